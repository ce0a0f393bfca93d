"""The model card of a drafter: its metadata, how to use it, and what was measured and is known of it; nothing else."""

import json
from dataclasses import dataclass, field
from pathlib import Path

from huggingface_hub import ModelCardData

TAGS = ["dflash", "speculative-decoding", "block-diffusion", "draft-model"]


@dataclass(frozen=True)
class Measurement:
    """One row of a benchmark: where, mean tokens per round, and times as fast as plain decoding if that was timed."""

    name: str
    tau: float
    speedup: float | None = None


@dataclass(frozen=True, kw_only=True)
class CardFacts:
    """What a card says besides what the config says.

    Args:
        repo: name of the drafter's repository.
        target: name of the target's repository.
        license: the licence's identifier on the Hub, None: not said.
        parameters: number of the drafter's parameters.
        provenance: the config's `provenance`.
        measurements: rows of a benchmark.
        measured_on: what the benchmark's file says of its machine.
    """

    repo: str
    target: str
    license: str | None = None
    parameters: int
    provenance: dict = field(default_factory=dict)
    measurements: list[Measurement] = field(default_factory=list)
    measured_on: str | None = None


def write_card(config, facts: CardFacts) -> str:
    """The text of the README.md of a drafter with `DFlashConfig` config."""
    metadata = ModelCardData(
        base_model=facts.target,
        library_name="transformers",
        license=facts.license,
        pipeline_tag="text-generation",
        tags=TAGS,
    )
    sections = [
        _introduction(config, facts),
        _measured(facts),
        _transformers(facts),
        _servers(config, facts),
        _training(facts.provenance),
    ]
    return f"---\n{metadata.to_yaml()}\n---\n\n" + "\n\n".join(section for section in sections if section) + "\n"


def read_benchmark(path: Path) -> tuple[list[Measurement], str | None]:
    """The rows of a benchmark's JSON, and what it says of the machine (`hardware`).

    The file holds one row, a list of rows, or an object whose `results` is such a list. A row has `tau`; `speedup`, or
    `tokens_per_second` with `plain_tokens_per_second`, as `dflash eval` and `dflash generate --compare --json` give
    them; and `name`, `domain` or `dataset`.

    Raises:
        ValueError: the file is no such JSON, or a row has no tau of at least 1.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path.name} is not JSON: {error}") from error
    hardware = content.get("hardware") if isinstance(content, dict) else None
    rows = content.get("results", [content]) if isinstance(content, dict) else content
    if not isinstance(rows, list) or not rows:
        raise ValueError(f"{path.name} has no results; a benchmark is a row with `tau`, or a list of such rows")
    return [_measurement(row, i, path.name) for i, row in enumerate(rows)], hardware


def _measurement(row, index: int, where: str) -> Measurement:
    row = row if isinstance(row, dict) else {}
    tau, speedup = row.get("tau"), row.get("speedup")
    plain = row.get("plain_tokens_per_second")
    if speedup is None and plain and row.get("tokens_per_second"):
        speedup = row["tokens_per_second"] / plain
    for name, value in (("tau", tau), ("speedup", speedup)):
        known = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not (known and value > 0) and (name, value) != ("speedup", None):
            raise ValueError(f"{where}, row {index}: {name} has to be a positive number, it is {value!r}")
    if tau < 1:
        raise ValueError(f"{where}, row {index}: tau is {tau}, but every round emits at least 1 token")
    return Measurement(
        str(row.get("name") or row.get("domain") or row.get("dataset") or f"run {index + 1}"), tau, speedup
    )


def _introduction(config, facts: CardFacts) -> str:
    target = f"[{facts.target}](https://huggingface.co/{facts.target})"
    kind = "DFlash 2" if config.has_correction else "DFlash"
    rows = {
        "target": target,
        "block size": f"{config.block_size} positions, {config.proposals()} of them drafted",
        "layers": f"{config.num_hidden_layers}, {facts.parameters / 1e6:,.1f} M parameters, {config.dtype}",
        "target layers read": ", ".join(map(str, config.target_layer_ids)),
        "mask token": str(config.mask_token_id),
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        f"# {facts.repo.split('/')[-1]}\n\nA {kind} drafter for {target}: it fills a block of tokens in one forward "
        "pass, and the target keeps those that it would have chosen itself. Decoding gets faster, and its output is "
        f"exactly the target's.\n\n| | |\n|---|---|\n{table}"
    )


def _measured(facts: CardFacts) -> str:
    if not facts.measurements:
        return ""
    rows = [
        f"| {row.name} | {row.tau:.2f} | {'not timed' if row.speedup is None else f'{row.speedup:.2f}x'} |"
        for row in facts.measurements
    ]
    where = f" Measured on {facts.measured_on}." if facts.measured_on else ""
    return (
        "## Measured\n\ntau is the mean number of tokens that a round of one draft and one verification yields."
        f"{where}\n\n| | tau | against plain decoding |\n|---|---|---|\n" + "\n".join(rows)
    )


def _transformers(facts: CardFacts) -> str:
    return f"""## Transformers

```python
from transformers import AutoModel, AutoModelForCausalLM, AutoTokenizer

draft = AutoModel.from_pretrained("{facts.repo}", trust_remote_code=True, dtype="auto", device_map="auto").eval()
target = AutoModelForCausalLM.from_pretrained("{facts.target}", dtype="auto", device_map="auto").eval()
tokenizer = AutoTokenizer.from_pretrained("{facts.target}")

messages = [{{"role": "user", "content": "How many positive whole-number divisors does 196 have?"}}]
inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
inputs = inputs.to(target.device)
output = target.generate(**inputs, max_new_tokens=512, custom_generate=draft.custom_generate)
print(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True))
```

`draft.spec_generate(target=target, **inputs, max_new_tokens=512)` does the same without `generate`, and
`target.generate(..., assistant_model=draft, speculation_type="dflash")` uses Transformers' own loop. Without
`trust_remote_code=True`, Transformers takes the folder for a plain Qwen3 with random embeddings."""


def _servers(config, facts: CardFacts) -> str:
    drafted = config.proposals()
    settings = json.dumps({"method": "dflash", "model": facts.repo, "num_speculative_tokens": drafted})
    tensorrt = f"""

## TensorRT-LLM

```yaml
speculative_config:
  decoding_type: DFlash
  speculative_model: {facts.repo}
  max_draft_len: {drafted}
```"""
    return f"""## vLLM

```bash
vllm serve {facts.target} --speculative-config '{settings}'
```

## SGLang

```bash
python -m sglang.launch_server --model-path {facts.target} --speculative-algorithm DFLASH \\
    --speculative-draft-model-path {facts.repo} --speculative-num-draft-tokens {config.block_size}
```{"" if config.has_correction else tensorrt}"""


def _training(provenance: dict) -> str:
    thinking = provenance.get("thinking_mode")
    lines = [
        "## Training\n",
        "Thinking mode: "
        + (
            "the checkpoint does not say which one it was trained for; the other one accepts fewer tokens."
            if thinking is None
            else f"trained for `{thinking}`; with another one, fewer tokens are accepted."
        ),
    ]
    rows = [f"| {key} | `{json.dumps(value)}` |" for key, value in sorted(provenance.items()) if key != "thinking_mode"]
    return "\n".join([*lines, "", "| provenance | |", "|---|---|", *rows] if rows else lines)
