"""The side that runs in vLLM's own environment, where this library is not installed: `python served.py JOBS.json`.

A job serves one target, with or without a drafter, and decodes some prompts greedily. For each job one line goes to
standard output, `MARK` and a JSON object; whatever else is printed is vLLM's own.
"""

import gc
import json
import platform
import sys
import traceback
from contextlib import contextmanager

MARK = "@judge "
COUNTERS = {
    "vllm:spec_decode_num_drafts": "rounds",
    "vllm:spec_decode_num_draft_tokens": "draft_tokens",
    "vllm:spec_decode_num_accepted_tokens": "accepted",
    "vllm:spec_decode_num_accepted_tokens_per_pos": "accepted_per_slot",
}


def main() -> None:
    with open(sys.argv[1], encoding="utf-8") as file:
        jobs = json.load(file)
    emit({"versions": versions()})
    for job in jobs:
        try:
            answer = serve(job)
        except Exception as error:  # the others are still worth serving
            traceback.print_exc()
            answer = {"error": f"{type(error).__name__}: {error}"}
        emit({"name": job["name"], **answer})
        clean_up()


def emit(answer: dict) -> None:
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)


def versions() -> dict:
    import torch
    import transformers
    import vllm

    return {
        "vllm": vllm.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }


def serve(job: dict) -> dict:
    """One engine: each prompt alone, with its drafts and counters, then all at once."""
    from vllm import LLM, SamplingParams

    with k_norm_of_every_layer(job["fix_k_norm"]), recorded_drafts() as drafts:
        llm = LLM(
            model=job["target"],
            speculative_config=job["speculative_config"],
            skip_tokenizer_init=True,
            dtype=job["dtype"],
            max_model_len=job["max_model_len"],
            max_num_seqs=len(job["prompts"]),
            enforce_eager=True,
            disable_log_stats=False,
            async_scheduling=False,
            seed=0,
        )
        greedy = SamplingParams(temperature=0.0, max_tokens=job["new"], ignore_eos=True, detokenize=False)

        def decode(prompts: list) -> list:
            outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], greedy, use_tqdm=False)
            return [list(output.outputs[0].token_ids) for output in outputs]

        tokens, steps = [], []
        before = counters(llm)
        for prompt in job["prompts"]:
            drafts.clear()
            tokens += decode([prompt])
            steps.append(list(drafts))
        after = counters(llm)
        batched = decode(job["prompts"])
    grown = {name: subtract(value, before.get(name)) for name, value in after.items()}
    return {"tokens": tokens, "batched": batched, "drafts": steps, "counters": grown}


def counters(llm) -> dict:
    """vLLM's public counters of speculation, under our names; none without a drafter."""
    found = {}
    for metric in llm.get_metrics():
        if metric.name in COUNTERS:
            found[COUNTERS[metric.name]] = list(metric.values) if hasattr(metric, "values") else metric.value
    return found


def subtract(after, before):
    if before is None:
        return after
    return [a - b for a, b in zip(after, before, strict=True)] if isinstance(after, list) else after - before


@contextmanager
def recorded_drafts():
    """The draft tokens of each step, as the proposer gives them: a list [K] per step, for a batch of one."""
    from vllm.v1.spec_decode.dflash import DFlashProposer

    original, seen = DFlashProposer.propose, []

    def propose(self, *args, **kwargs):
        proposed = original(self, *args, **kwargs)
        seen.append(proposed[0].tolist())
        return proposed

    DFlashProposer.propose = propose
    try:
        yield seen
    finally:
        DFlashProposer.propose = original


@contextmanager
def k_norm_of_every_layer(wanted: bool):
    """vLLM's CPU kernel normalises the context's keys of all layers with layer 0's weight; this uses each layer's."""
    import torch
    from vllm.model_executor.models.qwen3_dflash import DFlashQwen3Model

    def normalise(self, keys):  # [layers, positions, heads, head_dim]
        x = keys.float()
        x = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self._rms_norm_eps)
        return (x * self._k_norm_weights[:, None, None, :]).to(keys.dtype)

    original = DFlashQwen3Model._normalize_context_k
    if wanted:
        DFlashQwen3Model._normalize_context_k = normalise
    try:
        yield
    finally:
        DFlashQwen3Model._normalize_context_k = original


def clean_up() -> None:
    from vllm.distributed import cleanup_dist_env_and_memory

    gc.collect()
    cleanup_dist_env_and_memory()


if __name__ == "__main__":
    main()
