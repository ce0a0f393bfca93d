"""`dflash features`: what a target's layers say of training data, written to disk."""

from dataclasses import dataclass
from pathlib import Path

from dflash.loading import TargetOptions, load_target, say
from dflash.modeling.configuration_dflash import DFlashConfig
from dflash.training.documents import read_documents, read_sidecar
from dflash.training.feature_writer import write_features
from dflash.training.features import OnlineFeatures
from dflash.training.identity import differences, identify


@dataclass(frozen=True, kw_only=True)
class FeatureOptions(TargetOptions):
    """What the command line asks for."""

    documents: str
    output: str
    taps: list[int] | None = None
    draft_config: str | None = None
    stored_dtype: str = "bfloat16"
    last_hidden: bool = False
    batch_tokens: int = 8192
    limit: int | None = None


def run(options: FeatureOptions) -> int:
    """Runs the command; 0."""
    taps = options.taps or taps_of(options.draft_config)
    target, tokenizer = load_target(options)
    documents = read_documents(options.documents, limit=options.limit)
    warn_of_other_target(options.documents, target, tokenizer)
    source = OnlineFeatures(target, taps, options.last_hidden, options.batch_tokens)
    write_features(source, documents, options.output, options.stored_dtype, tokenizer)
    return 0


def taps_of(place: str) -> list[int]:
    """`target_layer_ids` of a drafter: its folder, its config.json, or its Hub repository."""
    return DFlashConfig.from_pretrained(place).target_layer_ids


def warn_of_other_target(path: str, target, tokenizer) -> None:
    """Says so if a data file was made with another target, tokenizer or template than these."""
    record = read_sidecar(path)
    if record is None:
        say(f"warning: {Path(path).name} has no record of what made it, so it is not compared with this target")
        return
    for problem in differences(record, identify(target, tokenizer)):
        say(f"warning: {Path(path).name} was made with something else: {problem}")
