"""Settings of a training run: one flat record, from a YAML file and flags."""

import dataclasses
import math
import types
import typing
from dataclasses import dataclass
from pathlib import Path

import yaml

POSITION_WEIGHTS = ("dpace", "decay", "none")
SCHEDULES = ("cosine", "wsd", "constant")


def _setting(default, help: str):
    return dataclasses.field(default=default, metadata={"help": help})


def _required(help: str):
    return dataclasses.field(metadata={"help": help})


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Everything a run depends on. Each field is also a flag of `dflash train`.

    Raises:
        ValueError: a value that cannot be right, or settings that contradict each other.
    """

    target: str = _required("folder or Hub repository of the target")
    documents: str = _required("JSONL of texts with loss masks, as `dflash data` writes it")
    output: str = _required("folder of the run: states to resume from, metrics, the best and the final drafter")
    features: str | None = _setting(None, "folder of cached features; default: the target runs in the loop")
    draft_config: str | None = _setting(None, "config.json, or a folder that has it, of a new drafter")
    init_from: str | None = _setting(None, "drafter to go on from, instead of draft_config")
    init_layers: tuple[int, ...] | None = _setting(
        None, "start each layer of a new drafter from this layer of the target; default: random"
    )
    block_size: int | None = _setting(None, "positions of a block, in place of the drafter's own; the result keeps it")
    revision: str | None = _setting(None, "revision of the target's repository")
    target_dtype: str = _setting("auto", "dtype of the target; auto: the checkpoint's, float32 on a CPU")
    max_length: int | None = _setting(
        None, "tokens of a document that are used; default: the drafter's max_position_embeddings"
    )

    max_anchors: int = _setting(512, "blocks per document and epoch, at most")
    anchor_share: float = _setting(1.0, "blocks per document and epoch, as a share of the positions that can have one")

    ce_weight: float = _setting(1.0, "weight of the cross-entropy to the data tokens")
    kl_weight: float = _setting(0.0, "weight of KL(target || drafter)")
    tv_weight: float = _setting(0.0, "weight of the total variation between target and drafter")
    position_weights: str = _setting("dpace", "how much each slot of a block counts: dpace, decay or none")
    dpace_alpha: float = _setting(0.5, "smoothing of dpace: 0 (none) to 1 (weights that ignore the drafter)")
    decay_gamma: float | None = _setting(None, "of decay; default: 7, 5, 4 for blocks of 16, 10, 8")
    head_tokens: str = _setting(
        "all",
        "`data`: head and distributions have only the tokens that documents train, and those of the drafter to go on "
        "from; the result proposes no others. Cheaper to train and to draft with",
    )
    head_chunk: int = _setting(512, "rows whose logits exist at a time")

    epochs: float = _setting(3.0, "passes over the documents")
    max_steps: int | None = _setting(None, "optimiser steps, instead of epochs")
    batch_size: int = _setting(64, "documents per optimiser step, over all processes")
    micro_batch_size: int = _setting(8, "documents per forward in each process; the rest is accumulated")
    learning_rate: float = _setting(6e-4, "peak learning rate of AdamW")
    betas: tuple[float, float] = _setting((0.9, 0.95), "of AdamW")
    weight_decay: float = _setting(0.0, "of AdamW, on matrices only")
    max_grad_norm: float = _setting(1.0, "the gradient is scaled down to this norm")
    schedule: str = _setting("cosine", "of the learning rate after the warm-up: cosine, wsd or constant")
    warmup_share: float = _setting(0.04, "share of the steps in which the learning rate rises")
    decay_share: float = _setting(0.2, "share of the steps in which it falls at the end, for wsd")
    min_lr_share: float = _setting(0.1, "what it falls to, as a share of its peak")
    seed: int = _setting(0, "of the drafter's weights, the order of documents and the anchors")

    cpu: bool = _setting(False, "stay on the CPU although there is an accelerator")
    mixed_precision: str | None = _setting(None, "no or bf16 (weights stay float32); default: what accelerate says")
    gradient_checkpointing: bool = _setting(False, "compute layers again in the backward pass, to save memory")
    attention: str = _setting("auto", "sdpa or flex; auto: flex on CUDA, sdpa elsewhere")
    max_bad_steps: int = _setting(10, "steps in a row with a loss or gradient that is not finite before the run stops")

    log_every: int = _setting(10, "steps between lines of metrics")
    save_every: int = _setting(200, "steps between states to resume from")
    keep_states: int = _setting(2, "states that are kept, the newest")
    eval_every: int = _setting(0, "steps between evaluations on held-out texts; 0: only at the end, if there are any")
    eval_prompts: str | None = _setting(None, "JSONL of held-out prompts, which choose the best drafter by real tau")
    eval_documents: str | None = _setting(
        None, "instead of these: JSONL of held-out texts with the target's greedy answers, replayed without decoding"
    )
    eval_limit: int | None = _setting(None, "use at most this many held-out prompts or texts")
    eval_max_new_tokens: int = _setting(128, "tokens decoded for each of them")
    report_to: tuple[str, ...] = _setting((), "trackers of accelerate: trackio, tensorboard, wandb, ...")
    project: str = _setting("dflash", "name of the project for trackers")
    save_dtype: str = _setting("bfloat16", "dtype of the weights of best and final drafter")

    def __post_init__(self):
        if (self.draft_config is None) == (self.init_from is None):
            raise ValueError("give draft_config (a new drafter) or init_from (one to go on from), and not both")
        if self.init_from is not None and self.init_layers is not None:
            raise ValueError("init_layers is for a new drafter, but init_from gives one that has its weights")
        _check_choices(self)
        _check_numbers(self)

    def to_dict(self) -> dict:
        """JSON and YAML types only."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in vars(self).items()}

    def write(self, path) -> None:
        """Writes the resolved settings as YAML."""
        Path(path).write_text(yaml.safe_dump(self.to_dict(), sort_keys=False), encoding="utf-8")


FIELDS = {field.name: field for field in dataclasses.fields(TrainConfig)}
TYPES = typing.get_type_hints(TrainConfig)


def read_settings(path) -> dict:
    """The settings in a YAML file.

    Raises:
        ValueError: not YAML, or not a mapping.
    """
    try:
        settings = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is not YAML: {error}") from error
    if settings is None:
        return {}
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold settings as `name: value`, it holds a {type(settings).__name__}")
    return settings


def build_config(settings: dict) -> TrainConfig:
    """A `TrainConfig` from plain values, as YAML or flags give them.

    Raises:
        ValueError: unknown or missing names, or values of the wrong type.
    """
    unknown = sorted(str(name) for name in settings if name not in FIELDS)
    if unknown:
        raise ValueError(f"unknown settings: {', '.join(unknown)}; known are {', '.join(FIELDS)}")
    required = [name for name, field in FIELDS.items() if field.default is dataclasses.MISSING]
    missing = [name for name in required if settings.get(name) is None]
    if missing:
        raise ValueError(f"settings lack {', '.join(missing)}")
    return TrainConfig(**{name: convert(name, value) for name, value in settings.items()})


def convert(name: str, value):
    """A plain value as the type of its field; raises `ValueError` if it is none of that type."""
    kind, optional = value_type(name)
    if value is None and optional:
        return None
    try:
        if typing.get_origin(kind) is tuple:
            items = [value] if isinstance(value, (str, int, float)) else value
            return tuple(_scalar(typing.get_args(kind)[0], item) for item in items)
        return _scalar(kind, value)
    except (TypeError, ValueError) as error:
        expected = "list" if typing.get_origin(kind) is tuple else kind.__name__
        raise ValueError(f"{name} must be {expected}{' or null' if optional else ''}, got {value!r}") from error


def value_type(name: str):
    """The type of a field without `None`, and whether it may be `None`."""
    kind = TYPES[name]
    if isinstance(kind, types.UnionType):
        (inner,) = (part for part in typing.get_args(kind) if part is not types.NoneType)
        return inner, True
    return kind, False


def _scalar(kind, value):
    if kind is float and not isinstance(value, bool):
        return float(value)  # YAML reads 6e-4 as a word
    if type(value) is not kind:
        raise TypeError
    return value


def _check_choices(config: TrainConfig) -> None:
    choices = {
        "position_weights": POSITION_WEIGHTS,
        "schedule": SCHEDULES,
        "head_tokens": ("all", "data"),
        "attention": ("auto", "sdpa", "flex"),
        "mixed_precision": (None, "no", "bf16"),
        "save_dtype": ("bfloat16", "float16", "float32"),
    }
    for name, allowed in choices.items():
        if getattr(config, name) not in allowed:
            raise ValueError(f"{name} must be one of {', '.join(map(str, allowed))}, got {getattr(config, name)!r}")
    if config.eval_prompts is not None and config.eval_documents is not None:
        raise ValueError("give eval_prompts (to decode) or eval_documents (to replay), and not both")
    if config.eval_every and config.eval_prompts is None and config.eval_documents is None:
        raise ValueError(f"eval_every is {config.eval_every}, but there are no eval_prompts or eval_documents")


def _check_numbers(config: TrainConfig) -> None:
    whole = "max_anchors head_chunk batch_size micro_batch_size max_bad_steps log_every save_every keep_states"
    for name in [*whole.split(), "block_size", "max_steps", "max_length", "eval_limit", "eval_max_new_tokens"]:
        value = getattr(config, name)
        if value is not None and value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for name in ("learning_rate", "max_grad_norm", "epochs", "anchor_share"):
        if not (math.isfinite(getattr(config, name)) and getattr(config, name) > 0):
            raise ValueError(f"{name} must be above 0, got {getattr(config, name)}")
    for name in ("anchor_share", "dpace_alpha", "warmup_share", "decay_share", "min_lr_share"):
        if not 0 <= getattr(config, name) <= 1:
            raise ValueError(f"{name} must lie in 0..1, got {getattr(config, name)}")
    losses = (config.ce_weight, config.kl_weight, config.tv_weight)
    if min(losses) < 0 or not any(losses):
        raise ValueError(f"ce_weight, kl_weight and tv_weight must be at least 0, and not all 0; got {losses}")
    if len(config.betas) != 2 or not all(0 <= beta < 1 for beta in config.betas):
        raise ValueError(f"betas must have 2 entries in 0..1, got {config.betas}")
    if config.eval_every < 0 or config.weight_decay < 0:
        raise ValueError(f"eval_every {config.eval_every} and weight_decay {config.weight_decay} must be at least 0")
