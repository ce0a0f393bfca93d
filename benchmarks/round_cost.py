"""What a round costs outside the models: this library, transformers' own DFlash loop, and z-lab's package.

    python benchmarks/round_cost.py [--repeats 30] [--smollm2]

A tiny pair (4-layer target of width 64, 2-layer drafter, block 8, one thread) makes Python the cost. All decode the
same prompt in turns with the same weights, each on its own copy of the target, and must give the same tokens.
Transformers' own path is measured with its own drafter class, and once more with ours, which is faster, in its place.
With `--smollm2`, also the share of a round that the embedded default spends outside the two models' forward passes.
"""

import argparse
import copy
import importlib.util
import inspect
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
import zipfile
from pathlib import Path

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, Qwen3Config

from dflash import DFlashConfig, DFlashDraftModel, demo
from dflash.modeling.cache_dflash import DFlashDraftCache
from dflash.modeling.target_dflash import TargetSession

VOCAB, NEW, EOS = 256, 64, 254
SHAPE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=VOCAB,
    max_position_embeddings=512,
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--smollm2", action="store_true", help="also measure the embedded default")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, one CPU thread")
    tiny_pair(arguments.repeats)
    if arguments.smollm2:
        smollm2()


def tiny_pair(repeats: int) -> None:
    """Prints milliseconds per round of each path, interleaved, and the two ratios."""
    torch.manual_seed(0)
    config = LlamaConfig(**SHAPE, num_hidden_layers=4, eos_token_id=EOS, bos_token_id=None, pad_token_id=0)
    target = LlamaForCausalLM(config).eval()
    draft = DFlashDraftModel(DFlashConfig(**drafter_settings())).eval()
    ids = torch.randint(0, VOCAB, (1, 16))
    rounds = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=NEW, return_dict=True).emitted.shape[1]
    runs = {
        "this library": ours(draft, copy.deepcopy(target), ids),
        "transformers": native(builtin(draft), copy.deepcopy(target), ids),
        "transformers, our drafter": native(draft, copy.deepcopy(target), ids),
        "z-lab 0.1.0": zlab(draft, copy.deepcopy(target), ids),
        "the two bare forwards": bare(draft, copy.deepcopy(target), ids, rounds),
    }
    expected = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    times = {name: [] for name in runs}
    for _ in range(repeats):
        for name, run in runs.items():
            begin = time.perf_counter()
            sequences = run()
            times[name].append((time.perf_counter() - begin) / rounds * 1000)
            assert sequences is None or torch.equal(sequences, expected), name
    best = {name: statistics.median(values) for name, values in times.items()}
    for name, values in times.items():
        print(f"{name:26} {min(values):6.2f} ms a round (fastest), {best[name]:6.2f} (median)")
    for other in list(runs)[1:]:
        print(f"this library / {other}: {best['this library'] / best[other]:.2f}")
    print(f"the two bare forwards / transformers: {best['the two bare forwards'] / best['transformers']:.2f}")


def drafter_settings() -> dict:
    return dict(
        SHAPE,
        architectures=["DFlashDraftModel"],
        num_hidden_layers=2,
        num_target_layers=4,
        rms_norm_eps=1e-6,
        attention_bias=False,
        hidden_act="silu",
        layer_types=["full_attention"] * 2,
        use_sliding_window=False,
        rope_theta=10000.0,
        block_size=8,
        dflash_config={"mask_token_id": VOCAB - 1, "target_layer_ids": [0, 1, 2]},
    )


def ours(draft, target, ids):
    return lambda: draft.spec_generate(target=target, input_ids=ids, max_new_tokens=NEW)


def native(draft, target, ids):
    settings = dict(assistant_model=draft, speculation_type="dflash", max_new_tokens=NEW, do_sample=False)
    return lambda: target.generate(ids, attention_mask=torch.ones_like(ids), **settings)


def bare(draft, target, ids, rounds: int):
    """Only the models: as many forwards of both as there are rounds, over a block each, and nothing between them."""
    block, positions = ids[:, :8], torch.arange(8)[None] + ids.shape[1]
    noise, features = torch.randn(1, 8, 64), torch.randn(1, 1, draft.fc.in_features)

    @torch.inference_mode()
    def run():
        cache = DFlashDraftCache([None, None])
        with TargetSession(target, draft.config.target_layer_ids) as session:
            session.forward(ids, torch.arange(ids.shape[1])[None], logits_to_keep=1)
            for _ in range(rounds):
                draft(noise_embeds=noise, context_hidden_states=features, cache=cache)
                session.forward(block, positions, logits_to_keep=8)
                session.rollback(8)

    return run


def builtin(draft):
    """The drafter class that transformers ships, with the same weights under its names."""
    config = transformers.MuseGlimmerAssistantConfig(
        **{key: value for key, value in drafter_settings().items() if key in ("hidden_act", "layer_types", *SHAPE)},
        **drafter_settings()["dflash_config"],
        num_hidden_layers=2,
        rms_norm_eps=1e-6,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        block_size=8,
    )
    model = transformers.MuseGlimmerAssistantModel(config).eval()
    names = {"fc.": "encoder.fc.", "hidden_norm.": "encoder.output_norm_enc."}
    weights = {}
    for name, weight in draft.state_dict().items():
        prefix = next((old for old in names if name.startswith(old)), "")
        weights[names.get(prefix, "") + name.removeprefix(prefix)] = weight
    model.load_state_dict(weights)
    return model


def zlab(draft, target, ids):
    """z-lab's loop and model class, from the wheel on PyPI, with the same weights."""
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, "dflash==0.1.0"]
        subprocess.run(download, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            source = wheel.extract("dflash/model.py", folder)
        spec = importlib.util.spec_from_file_location("zlab_model", source)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    settings = {key: value for key, value in drafter_settings().items() if key != "architectures"}
    model = module.DFlashDraftModel(Qwen3Config(**settings)).eval()
    model.load_state_dict(draft.state_dict())
    return lambda: module.dflash_generate(model, target, ids, NEW, None)


def smollm2() -> None:
    """Prints where the time of a round goes on the embedded default."""
    folder = demo.demo_target()
    target = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    draft = DFlashDraftModel.from_pretrained(demo.DRAFTER, dtype=torch.float32).eval()
    messages = [{"role": "user", "content": "How many positive whole-number divisors does 196 have?"}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    spent = {"target's forward": 0.0, "drafter's forward": 0.0, "the head it borrows": 0.0}
    target.forward = timed(target.forward, spent, "target's forward")
    draft.forward = timed(draft.forward, spent, "drafter's forward")
    TargetSession.head = timed(TargetSession.head, spent, "the head it borrows")
    output = draft.spec_generate(target=target, **inputs, max_new_tokens=64, return_dict=True)
    rounds = output.emitted.shape[1]
    total = output.draft_time + output.verify_time
    spent["target's forward"] -= output.prefill_time
    print(f"SmolLM2-135M, {total / rounds * 1000:.0f} ms a round, tau {output.tau:.2f}, of which")
    for name, seconds in spent.items():
        print(f"  {name}: {seconds / total:.1%}")
    print(f"  all else: {1 - sum(spent.values()) / total:.1%}")


def timed(function, spent: dict, name: str):
    def run(*args, **kwargs):
        begin = time.perf_counter()
        output = function(*args, **kwargs)
        spent[name] += time.perf_counter() - begin
        return output

    run.__signature__ = inspect.signature(function)
    return run


if __name__ == "__main__":
    main()
