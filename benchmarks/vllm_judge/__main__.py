"""vLLM on a CPU as a judge of the checkpoints that this library writes, and of what it decodes with them.

    python -m benchmarks.vllm_judge [--venv FOLDER] [--demo]

or, from a fresh clone,

    python3 -m venv .venv && .venv/bin/pip install -q "torch==2.13.0" -e ".[demo]" &&
    .venv/bin/python -m benchmarks.vllm_judge --demo

vLLM lives in a virtual environment of its own: about 0.9 GB to download (more where pip chooses a CUDA build of torch),
3.4 GB on disk, 6 minutes. Without `--venv` it is temporary; with it, it is made there and kept, or taken if it is
there. All else takes about 5 minutes of processor time.

Tiny random targets get drafters of which about a third of the drafts are right, written by `dflash.checkpoint`. vLLM
serves each pair in float32, and has to give the tokens that it gives without a drafter, the draft tokens that
`spec_generate` proposes in each round, and the same tau by its counters. Damaged copies of a drafter have to be told
apart. `--demo` adds SmolLM2-135M-Instruct with the drafter in hub_configs/.

vLLM 0.32's CPU kernel normalises the keys of the context with the first layer's K-norm in every layer. The judged
runs replace that one function, which each says; a drafter whose layers share one K-norm is judged without it, and what
the unmended vLLM does to an ordinary one is reported.

The result goes to benchmarks/results/vllm_judge.json once everything has run. Exit codes: 0 all checks hold, 1 one does
not, 130 interrupted.
"""

import argparse
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path

import torch
import transformers

from . import environment, pairs, verdict

COMMAND = "python -m benchmarks.vllm_judge"
RESULT = Path(__file__).parents[1] / "results" / "vllm_judge.json"
SLIDING = dict(layer_types=["sliding_attention"] * 2, use_sliding_window=True, sliding_window=pairs.WINDOW)
# name: (kind of target, what differs from `pairs.tiny_drafter`, positions of a served block)
DRAFTERS = {
    "llama, full attention": ("llama", {}, pairs.BLOCK),
    "qwen3, full attention": ("qwen3", {}, pairs.BLOCK),
    "qwen3, full attention, half a block": ("qwen3", {}, pairs.BLOCK // 2),
    "qwen3, causal blocks": ("qwen3", {"is_causal": True}, pairs.BLOCK),
    "qwen3, sliding window": ("qwen3", SLIDING, pairs.BLOCK),
    "qwen3, sliding window, not causal": ("qwen3", {**SLIDING, "is_causal": False}, pairs.BLOCK),
}
DAMAGED = "qwen3, full attention"  # the drafter whose copies are damaged


@dataclass
class Case:
    """A drafter to serve, and what this library does with it; a control serves a damaged copy instead.

    `kind`: "judged" and "control" have checks; "reported" only has figures.
    """

    name: str
    kind: str
    target: str
    draft: Path
    block: int
    prompts: list
    ours: list
    new: int
    fix_k_norm: bool = True
    checks: list = field(default_factory=list)

    def job(self, target_folder: Path) -> dict:
        speculation = {"method": "dflash", "model": str(self.draft), "num_speculative_tokens": self.block - 1}
        return _job(self.name, target_folder, self.prompts, self.new, speculation, self.fix_k_norm)


def _job(name, target_folder, prompts, new, speculation=None, fix_k_norm=False) -> dict:
    return {
        "name": name,
        "target": str(target_folder),
        "speculative_config": speculation,
        "fix_k_norm": fix_k_norm,
        "dtype": "float32",
        "max_model_len": 512,
        "prompts": prompts,
        "new": new,
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.vllm_judge",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--venv", type=Path, metavar="FOLDER", help="vLLM's virtual environment, made if need be, kept")
    parser.add_argument("--demo", action="store_true", help="also SmolLM2-135M with the drafter in hub_configs/")
    parser.add_argument("--result", type=Path, default=RESULT, metavar="FILE", help="default: %(default)s")
    arguments = parser.parse_args()
    for number in (signal.SIGTERM, signal.SIGHUP):  # so that what has to be removed is
        signal.signal(number, lambda number, _: sys.exit(128 + number))
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        with tempfile.TemporaryDirectory(prefix="vllm-judge-", ignore_cleanup_errors=True) as scratch:
            return judge(arguments, Path(scratch))
    except KeyboardInterrupt:
        return 130


def judge(arguments: argparse.Namespace, scratch: Path) -> int:
    begin = time.monotonic()
    folder = arguments.venv or scratch / "environment"
    if not folder.exists():
        print(f"installing {' and '.join(environment.PACKAGES)} (about 0.9 GB, 6 minutes)", flush=True)
    python = environment.environment(folder.absolute())
    print("making pairs", flush=True)
    targets, cases = tiny_cases(scratch)
    if arguments.demo:
        demo_case(scratch, targets, cases)
    versions = serve(python, scratch, targets, cases)
    result = summary(arguments, versions, cases, round(time.monotonic() - begin))
    verdict.write_result(arguments.result, result)
    print(f"{'all checks hold' if result['passed'] else 'FAILED'}; see {arguments.result}")
    return 0 if result["passed"] else 1


def tiny_cases(scratch: Path) -> tuple[dict[str, Path], list[Case]]:
    """Writes every tiny pair below `scratch`, decodes with it, and gives the targets' folders and the cases."""
    prompts, targets, models, written, cases = pairs.tiny_prompts(), {}, {}, {}, []
    for kind in pairs.TARGETS:
        models[kind], targets[kind] = pairs.tiny_target(kind), scratch / kind
        models[kind].save_pretrained(targets[kind])

    def add(name: str, kind: str, settings: dict, block: int, **how) -> Case:
        trained = f"{kind} {settings}"
        if trained not in written:
            folder = scratch / f"drafter{len(written)}"
            written[trained] = pairs.write_drafter(folder, models[kind], prompts, **settings)
        ours = decode(written[trained], models[kind], prompts, pairs.NEW, block)
        cases.append(Case(name, "judged", kind, written[trained], block, prompts, ours, pairs.NEW, **how))
        return cases[-1]

    made = {name: add(name, *what) for name, what in DRAFTERS.items()}
    add(
        "qwen3, one K-norm for all layers, unmended vLLM", "qwen3", {"same_k_norm": True}, pairs.BLOCK, fix_k_norm=False
    )
    whole = made[DAMAGED]
    shared = (whole.target, whole.draft, whole.block, prompts, whole.ours, whole.new)
    cases.append(Case(f"{DAMAGED}, unmended vLLM", "reported", *shared, fix_k_norm=False))
    for damage in pairs.DAMAGES:
        copy = pairs.write_damaged(whole.draft, scratch / f"damaged{len(cases)}", damage)
        cases.append(Case(f"damaged: {damage}", "control", whole.target, copy, *shared[2:]))
    return targets, cases


def demo_case(scratch: Path, targets: dict[str, Path], cases: list[Case]) -> None:
    """Adds SmolLM2-135M-Instruct with the published drafter, on two chat prompts."""
    from dflash import demo

    targets["smollm2"] = demo.demo_target()
    target = transformers.AutoModelForCausalLM.from_pretrained(targets["smollm2"], dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(targets["smollm2"])
    prompts = []
    for question in ("How many positive whole-number divisors does 196 have?", "Write a haiku about the sea."):
        chat = [{"role": "user", "content": question}]
        prompts.append(tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False))
    draft = scratch / "smollm2-drafter"
    shutil.copytree(demo.DRAFTER, draft, ignore=shutil.ignore_patterns("__pycache__"))
    block = pairs.RecordingDrafter.from_pretrained(draft).config.block_size
    ours = decode(draft, target, prompts, 32, block)
    cases.append(Case("SmolLM2-135M-Instruct, hub_configs", "judged", "smollm2", draft, block, prompts, ours, 32))


def decode(draft: Path, target, prompts: list, new: int, block: int) -> list[verdict.Rounds]:
    model = pairs.RecordingDrafter.from_pretrained(draft, dtype=torch.float32).eval()
    model.config.draft_token_ids = None  # vLLM drafts over all tokens
    return [pairs.decode(model, target, prompt, new, block) for prompt in prompts]


def serve(python: Path, scratch: Path, targets: dict[str, Path], cases: list[Case]) -> dict:
    """Serves every target plainly and every case, and fills in the checks; gives the versions of vLLM's side."""
    plain, jobs, named = {}, [], {case.name: case for case in cases}
    for kind, folder in targets.items():
        own = [case for case in cases if case.target == kind]
        jobs.append(_job(f"plain {kind}", folder, own[0].prompts, own[0].new))
        jobs += [case.job(folder) for case in own]
    print(f"serving {len(jobs)} engines with vLLM", flush=True)
    with closing(environment.serve(python, jobs, scratch)) as answers:
        versions = next(answers)["versions"]
        for answer in answers:
            case = named.get(answer["name"])
            if case is None:
                plain[answer["name"]] = answer
                print(f"served  {answer['name']}", flush=True)
                continue
            case.checks = check(case, plain[f"plain {case.target}"], answer)
            print(f"{_word(case)}  {case.name}{_figures(case)}", flush=True)
    return versions


def check(case: Case, plain: dict, answer: dict) -> list[verdict.Check]:
    if "error" in plain:
        return [verdict.Check("plain serving", False, {"error": plain["error"]})]
    judged = verdict.judge_control if case.kind == "control" else verdict.judge_case
    return judged(case.ours, plain["tokens"], answer)


def _word(case: Case) -> str:
    if case.kind == "reported":
        return "as is "
    return "passed" if verdict.passed(case.checks) else "FAILED"


def _figures(case: Case) -> str:
    failed = [f"\n        {item.name}: {item.figures}" for item in case.checks if not item.passed]
    drafts = [item.figures for item in case.checks if "equal_rounds" in item.figures]
    said = "".join(f"; {figures['equal_rounds']} of {figures['rounds']} rounds equal" for figures in drafts)
    return said + "".join(failed)


def summary(arguments: argparse.Namespace, versions: dict, cases: list[Case], seconds: int) -> dict:
    """The result file: figures of every check, and what they were made with."""
    groups = {"cases": "judged", "controls": "control", "reported_only": "reported"}
    for group, kind in groups.items():
        groups[group] = [
            {**verdict.report(case.name, case.checks), "k_norm_mended": case.fix_k_norm}
            for case in cases
            if case.kind == kind
        ]
    return {
        "made_by": COMMAND + (" --demo" if arguments.demo else ""),
        "passed": all(entry["passed"] for group in ("cases", "controls") for entry in groups[group]),
        "machine": verdict.machine(),
        "vllm_side": versions,
        "our_side": {"torch": torch.__version__, "transformers": transformers.__version__},
        "dtype": "float32",
        "seconds": seconds,
        "processor_seconds": round(time.process_time() + resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime),
        "k_norm_mended": "true: vLLM's context K-norm, which on CPUs takes the first layer's weight for every layer, "
        "was replaced by one that takes each layer's own; false: vLLM as installed",
        **groups,
    }


if __name__ == "__main__":
    sys.exit(main())
