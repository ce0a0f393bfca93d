"""Peak memory and time of prefilling a long prompt: plain, with all hidden states, and by this library.

    python benchmarks/prefill.py [--tokens 8192] [--chunk 512]

A small random Llama in float32 on one CPU thread. Memory is what operators allocate and have not freed, so the
weights are not in it; "plain" and "all hidden states" go in chunks of the same size, and the latter keeps what every
layer gave, as a drafter that reads `output_hidden_states=True` has to.
"""

import argparse
import sys
import time
from pathlib import Path

import torch
from transformers import DynamicCache

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))

from dflash.modeling.target_dflash import _cache_argument  # noqa: E402
from memory import LiveBytes  # noqa: E402
from tiny import tiny_drafter, tiny_prompt, tiny_target  # noqa: E402

TAPS = 3  # of `tiny_drafter`


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--chunk", type=int, default=512)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    settings = {"dtype": torch.float32, "max_position_embeddings": 2 * arguments.tokens}
    target, draft, ids = tiny_target(**settings), tiny_drafter(**settings), tiny_prompt(arguments.tokens)
    for chunk in (arguments.tokens, arguments.chunk):
        base = report(f"plain, chunks of {chunk}", lambda chunk=chunk: plain(target, ids, chunk, False))
        report(f"all hidden states, chunks of {chunk}", lambda chunk=chunk: plain(target, ids, chunk, True), base)
        ours = report(f"this library, chunks of {chunk}", lambda chunk=chunk: spec(draft, target, ids, chunk), base)
        allowed = base + chunk * TAPS * target.config.hidden_size * 4 + kept(draft, arguments.tokens)
        print(f"  against plain, the taps of a chunk, and the drafter's keys and values: {ours / allowed:.2f}")


def report(name: str, run, base: int | None = None) -> int:
    """Prints the peak and the time of `run`, each in a run of its own; gives the peak in bytes."""
    with LiveBytes() as memory:
        run()
    begin = time.perf_counter()
    run()
    seconds = time.perf_counter() - begin
    ratio = "" if base is None else f", {memory.peak / base:.2f} of plain"
    print(f"{name}: {memory.peak / 2**20:.1f} MiB{ratio}, {seconds:.2f} s", flush=True)
    return memory.peak


@torch.inference_mode()
def plain(target, ids, chunk: int, hidden: bool):
    """The target alone; with `hidden`, gives the hidden states [1, P, H] of every layer."""
    cache, states = DynamicCache(config=target.config), []
    options = {"use_cache": True, "logits_to_keep": 1, "output_hidden_states": hidden, _cache_argument(target): cache}
    for piece in ids.split(chunk, dim=1):
        output = target(piece, **options)
        if hidden:
            states.append(output.hidden_states)
    return [torch.cat(layer, dim=1) for layer in zip(*states, strict=True)]


def spec(draft, target, ids, chunk: int):
    """Prefill and the first token, whose drafter's context is complete."""
    return draft.spec_generate(
        target=target, input_ids=ids, max_new_tokens=1, prefill_chunk_size=chunk, return_dict=True
    )


def kept(draft, tokens: int) -> int:
    """Bytes of the drafter's own keys and values for the prompt."""
    config = draft.config
    return 2 * config.num_hidden_layers * (tokens + 256) * config.num_key_value_heads * config.head_dim * 4


if __name__ == "__main__":
    main()
