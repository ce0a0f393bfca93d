"""How serving engines run a drafter: the exact settings, and what an engine would silently get wrong.

The rules are those of vLLM 0.32 and 0.33, SGLang 0.5.23 and TensorRT-LLM 1.4, read in their sources; those of vLLM were
also measured. K differs: SGLang counts the positions of a block, the other two count the tokens drafted, one fewer.
"""

import json
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from dflash.catalogue import Entry, find_entry
from dflash.modeling.configuration_dflash import DFlashConfig

NON_CAUSAL_BACKENDS = "FLASH_ATTN, FLASHINFER, TRITON_ATTN, FLEX_ATTENTION, ROCM_ATTN, ROCM_AITER_FA or CPU_ATTN"
UNKNOWN_TARGET = "TARGET"


@dataclass(frozen=True)
class Drafter:
    """A drafter to serve.

    Attributes:
        name: the folder or Hub repository that an engine is told.
        raw: its config.json as it is; of a drafter of the catalogue, the one there.
        config: the same, read and checked.
        target, revision: None if not known.
        entry: its entry in the catalogue, if it was found there.
    """

    name: str
    raw: dict
    config: DFlashConfig
    target: str | None = None
    revision: str | None = None
    entry: Entry | None = None

    def key(self, name: str):
        """What config.json has under `name`, in `dflash_config` or at top level, or None."""
        return (self.raw.get("dflash_config") or {}).get(name, self.raw.get(name))

    @property
    def layers(self) -> range:
        return range(self.config.num_hidden_layers)

    @property
    def slides(self) -> list[bool]:
        """For each layer, whether it has a sliding window."""
        return [self.config.layer_window(i) is not None for i in self.layers]

    @property
    def is_default_causal(self) -> bool:
        """Whether sliding layers are causal inside a block and full ones are not, which engines assume unless told."""
        return all(self.config.layer_is_causal(i) == slides for i, slides in zip(self.layers, self.slides, strict=True))

    @property
    def drafts_from_anchor(self) -> bool:
        """Whether slot k predicts the token after position k, the anchor's slot included."""
        return bool(self.key("sample_from_anchor") or self.key("shift_label"))

    @property
    def own_parts(self) -> list[str]:
        """Embedding, head and vocabulary of its own, instead of the target's."""
        parts = [name for name in ("has_embed_tokens", "has_lm_head") if self.key(name)]
        reduced = self.raw.get("draft_vocab_size") not in (None, self.config.vocab_size)
        return parts + ["draft_vocab_size"] * reduced


@dataclass(frozen=True)
class Serving:
    """How one engine serves a drafter.

    Attributes:
        settings: what the engine takes: vLLM's `speculative_config`, SGLang's flags, TensorRT-LLM's
            `DFlashDecodingConfig`.
        command: the same in the form in which it is given to the engine.
        problems: why the engine cannot run this drafter as it was trained; without any, it can.
        warnings: what does not make the output wrong but may lower acceptance.
        notes: what the engine needs.
    """

    engine: str
    settings: dict
    command: str
    problems: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def read_drafter(name: str, revision: str | None = None, target: str | None = None) -> Drafter:
    """A drafter by its folder, name in the catalogue, or Hub repository, in this order; only its config.json is read.

    Raises:
        ValueError: its config is not one of a DFlash drafter, or the catalogue knows only a part of it.
        OSError: there is none.
    """
    entry = None if Path(name).is_dir() else find_entry(name)
    if entry is None:
        raw, _ = DFlashConfig.get_config_dict(name, revision=revision)
        if not raw:
            raise FileNotFoundError(f"{name} has no config.json")
        return Drafter(name, raw, DFlashConfig.from_dict(raw), target, revision)
    _require_config(entry)
    source = entry.source
    shipped = any(entry.folder.glob("*.safetensors"))
    model = str(entry.folder) if shipped else source["repository"]
    config = DFlashConfig.from_dict(entry.config)
    return Drafter(model, entry.config, config, target or source["target"], revision or source["revision"], entry)


def _require_config(entry: Entry) -> None:
    if entry.config is None:
        gaps = "; ".join(f"{key}: {why}" for key, why in entry.source["uncertain"].items())
        raise ValueError(
            f"too little is known of {entry.name} to say how to serve it ({gaps}); give its folder, or its repository "
            f"{entry.source['repository']}"
        )


def vllm(drafter: Drafter) -> Serving:
    """vLLM's `--speculative-config`."""
    drafted = drafter.config.proposals()
    settings = {"method": "dflash", "model": drafter.name, "num_speculative_tokens": drafted}
    problems, warnings = [], _unread_scales(drafter, "vLLM")
    if drafter.drafts_from_anchor:
        problems.append("it drafts from the anchor (sample_from_anchor): the V2 runner refuses that, V1 ignores it")
    if drafter.config.target_layer_ids[-1] == drafter.config.num_target_layers - 1:
        warnings.append("it taps the target's last layer, which vLLM reads before the final norm")
    notes = [
        f"num_speculative_tokens has to be given: vLLM does not read block_size {drafter.config.block_size}, and would "
        f"accept more than {drafted}",
        f"each request needs {drafted + 1} slots in max_num_batched_tokens",
    ]
    notes += _all_tokens(drafter, "vLLM")
    if drafter.config.has_correction or 0 < sum(drafter.slides) < len(drafter.slides):
        what = "DFlash 2 needs" if drafter.config.has_correction else "sliding and full layers together need"
        notes.append(f"{what} the V2 model runner (VLLM_USE_V2_MODEL_RUNNER=1), and that needs Triton")
    if not all(drafter.config.layer_is_causal(i) for i in drafter.layers):
        notes.append(f"its attention backend has to serve non-causal blocks: {NON_CAUSAL_BACKENDS}")
        notes.append('"attention_backend" in the settings chooses one for the drafter alone')
    target = shlex.quote(drafter.target or UNKNOWN_TARGET)
    command = f"python -m vllm.entrypoints.openai.api_server --model {target} --speculative-config "
    return Serving("vllm", settings, command + shlex.quote(json.dumps(settings)), problems, warnings, notes)


def sglang(drafter: Drafter) -> Serving:
    """SGLang's flags."""
    settings = {
        "--speculative-algorithm": "DFLASH",
        "--speculative-draft-model-path": drafter.name,
        "--speculative-num-draft-tokens": drafter.config.block_size,
    }
    problems, warnings = _target_parts_only(drafter), _unread_scales(drafter, "SGLang")
    if drafter.drafts_from_anchor:
        problems.append("it drafts from the anchor (sample_from_anchor), a key that SGLang does not read for DFlash")
    if drafter.raw.get("is_causal") is None and not drafter.is_default_causal:
        problems.append("only dflash_config.causal says how its blocks attend, and SGLang reads is_causal at top level")
    if drafter.key("use_swa") and drafter.raw.get("sliding_window") is None:
        problems.append("only dflash_config.swa_window_size has its window, and SGLang reads sliding_window")
    if drafter.config.target_layer_ids[-1] == drafter.config.num_target_layers - 1:
        problems.append("it taps the target's last layer, which SGLang never captures")
    backends = "flashinfer, fa3, fa4, triton, ascend or intel_xpu"
    if all(drafter.slides) or drafter.config.is_causal:
        backends += ", or trtllm_mha"
    notes = [
        f"its {drafter.config.block_size} draft tokens count the anchor: {drafter.config.proposals()} are drafted",
        "it runs on CUDA, NPU and XPU, not on a CPU, and without pipeline parallelism",
        f"the drafter's attention backend has to be {backends}",
        *_all_tokens(drafter, "SGLang"),
    ]
    target = shlex.quote(drafter.target or UNKNOWN_TARGET)
    command = f"python -m sglang.launch_server --model-path {target} {flags(settings)}"
    return Serving("sglang", settings, command, problems, warnings, notes)


def trtllm(drafter: Drafter) -> Serving:
    """TensorRT-LLM's `DFlashDecodingConfig`, as JSON, which is YAML too."""
    drafted = drafter.config.proposals()
    settings = {"decoding_type": "DFlash", "max_draft_len": drafted, "speculative_model": drafter.name}
    problems, warnings = _target_parts_only(drafter), _unread_scales(drafter, "TensorRT-LLM")
    if drafter.config.has_correction:
        problems.append("it is a DFlash 2 drafter, whose convolutions and selector TensorRT-LLM does not have")
    if drafter.key("attention_sink_bias"):
        problems.append("it has attention sinks (attention_sink_bias), which TensorRT-LLM does not read")
    if drafter.drafts_from_anchor:
        problems.append("it drafts from the anchor (sample_from_anchor), a key that TensorRT-LLM does not read")
    if not drafter.is_default_causal:
        problems.append("TensorRT-LLM reads no is_causal: sliding layers are causal there and full ones are not")
    if drafter.raw.get("model_type") != "qwen3":
        problems.append(f"its model_type is {drafter.raw.get('model_type')!r}; TensorRT-LLM builds its layers by qwen3")
    scaled = drafter.config.rope_parameters.get("rope_type", "default") != "default"
    if drafter.raw.get("rope_scaling" if scaled else "rope_theta") is None:
        warnings.append("its RoPE is in rope_parameters only; whether TensorRT-LLM reads that was not verified")
    notes = [f"max_draft_len may be lowered, and is at most {drafted}"]
    if drafter.raw.get("block_size") is None:
        notes = [f"max_draft_len is at most {drafted}, which is not checked: block_size is in dflash_config only"]
    notes += _all_tokens(drafter, "TensorRT-LLM")
    return Serving("trtllm", settings, json.dumps(settings), problems, warnings, notes)


ENGINES = {"vllm": vllm, "sglang": sglang, "trtllm": trtllm}


def flags(settings: dict) -> str:
    """Settings as words of a command line."""
    return " ".join(shlex.quote(str(word)) for pair in settings.items() for word in pair)


def _target_parts_only(drafter: Drafter) -> list[str]:
    parts = drafter.own_parts
    return [f"it has parts of its own ({', '.join(parts)}), and the engine uses the target's instead"] if parts else []


def _all_tokens(drafter: Drafter, engine: str) -> list[str]:
    if drafter.config.draft_token_ids is None:
        return []
    return [f"{engine} does not read draft_token_ids: it drafts over all tokens, which costs time and is not wrong"]


def _unread_scales(drafter: Drafter, engine: str) -> list[str]:
    """Factors of the drafter's input, and of its logits, among keys that the engine does not read for it."""
    config, warnings = drafter.config, []
    if config.has_correction:
        return warnings
    if config.input_embedding_scale != 1.0:
        warnings.append(
            f"{engine} does not read input_embedding_scale {config.input_embedding_scale:.6g}: few drafts are accepted "
            "unless it scales this target's embeddings by itself"
        )
    if engine == "TensorRT-LLM" and (config.final_logit_softcapping or config.output_multiplier != 1.0):
        warnings.append(
            f"{engine} does not read final_logit_softcapping and output_multiplier: greedy drafts are the same without "
            "them, sampled ones are not"
        )
    return warnings
