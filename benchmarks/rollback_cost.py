"""What an exact rollback of a hybrid target costs a round: replaying its mixers, or the whole model.

    python benchmarks/rollback_cost.py [--rounds 30]

A random Qwen3.5-like target (12 layers of width 256, three quarters of them linear attention) in float32 on one CPU
thread verifies blocks of 16 and keeps some of each. Either way restores the states to those before the block; then the
library runs the modules that drive them over the tokens that stay, while the other way runs the whole target.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path

import torch

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from dflash.modeling.rollback_dflash import crop_keys  # noqa: E402
from dflash.modeling.target_dflash import TargetSession  # noqa: E402
from families import build_target  # noqa: E402

BLOCK, PREFIX = 16, 200


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    target = build_target(
        "qwen3_5",
        dtype=torch.float32,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=12,
        layer_types=["linear_attention"] * 3 * 3 + ["full_attention"] * 3,
        head_dim=64,
        linear_key_head_dim=32,
        linear_value_head_dim=32,
        max_position_embeddings=8192,
    )
    times = {"verify": [], "replay the mixers": [], "replay the whole model": []}
    for number in range(arguments.rounds):
        kept = number % (BLOCK - 1) + 1
        for whole in (False, True):
            verify, back = one_round(target, kept, whole)
            times["verify"].append(verify)
            times["replay the whole model" if whole else "replay the mixers"].append(back)
    for name, values in times.items():
        print(f"{name}: {statistics.median(values) * 1000:.1f} ms a round (median), {min(values) * 1000:.1f} (fastest)")


@torch.inference_mode()
def one_round(target, kept: int, whole: bool) -> tuple[float, float]:
    """Seconds of a block's forward, and of taking all but `kept` of its tokens back."""
    ids = torch.randint(61, (1, PREFIX + BLOCK), generator=torch.Generator().manual_seed(kept))
    positions = torch.arange(PREFIX + BLOCK)[None]
    with TargetSession(target, [0, 11]) as session:
        session.forward(ids[:, :PREFIX], positions[:, :PREFIX], logits_to_keep=1)
        session.rollback(0)
        begin = time.perf_counter()
        session.forward(ids[:, PREFIX:], positions[:, PREFIX:], logits_to_keep=BLOCK)
        middle = time.perf_counter()
        if whole:
            for layer in session.cache.layers:
                crop_keys(layer, BLOCK)
            session._rollback.restore()
            end = PREFIX + kept
            session.forward(ids[:, PREFIX:end], positions[:, PREFIX:end], logits_to_keep=1)
            session.rollback(0)
        else:
            session.rollback(BLOCK - kept)
        return middle - begin, time.perf_counter() - middle


if __name__ == "__main__":
    main()
