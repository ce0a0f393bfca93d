"""Reads a drafter of any known format into `DFlashDraftModel`."""

from dataclasses import dataclass

import torch
from transformers import AutoConfig

from dflash.dialects import assistant, deepspec, modelopt, speculators, torchspec, zlab
from dflash.dialects.files import fetch, read_settings, read_tensors
from dflash.dialects.findings import Findings
from dflash.dialects.tensors import split_fused, tidy
from dflash.modeling.configuration_dflash import DFlashConfig
from dflash.modeling.modeling_dflash import DFlashDraftModel

READERS = (speculators, assistant, deepspec, torchspec, modelopt, zlab)
_OF_TARGET = {"num_target_layers": "num_hidden_layers", "vocab_size": "vocab_size"}
_VOCABULARY = ("d2t", "t2d")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint in this library's terms: the format it came in, its config, and its tensors by z-lab's names."""

    dialect: str
    config: DFlashConfig
    tensors: dict[str, torch.Tensor]


def load_drafter(
    source,
    *,
    revision: str | None = None,
    strict: bool = True,
    dtype: str | torch.dtype = "auto",
    allow_pickle: bool = False,
    target=None,
    settings: dict | None = None,
    **options,
) -> DFlashDraftModel:
    """Loads a drafter published in any format that this library reads, whichever that is.

    Args:
        source (`str` or `os.PathLike`): a folder, or a repository on the Hub, of which config and weights are read.
        revision (`str`, *optional*): of the repository.
        strict (`bool`): unknown keys, and unknown, missing or misshapen tensors are an error; False: a warning each.
        dtype (`str` or `torch.dtype`): "auto" is that of the weights.
        allow_pickle (`bool`): also read `pytorch_model*.bin`, with `weights_only=True`.
        target (`PreTrainedModel` or its config, *optional*): says how deep the target is, and how large its vocabulary,
            where the format does not.
        settings (`dict`, *optional*): what the checkpoint does not say, by this library's keys, such as
            `{"block_size": 16}`; a value that it does say has to agree.
        options: as for `from_pretrained`, such as `device_map` and `attn_implementation`.

    Raises:
        ValueError: the checkpoint contradicts itself, is incomplete, or is another kind of drafter.
        FileNotFoundError: a file is missing.
    """
    checkpoint = read_checkpoint(
        source, revision=revision, strict=strict, allow_pickle=allow_pickle, target=target, settings=settings
    )
    config, tensors = checkpoint.config, checkpoint.tensors
    if dtype == "auto":
        dtype = _dtype(source, config, tensors)
    base = super(DFlashDraftModel, DFlashDraftModel)  # its own check is made, with the names in the files
    model = base.from_pretrained(None, config=config, state_dict=tensors, dtype=dtype, **options)
    model.config.name_or_path = model.name_or_path = str(source)
    model.check_tensors()
    return model


def read_checkpoint(
    source, *, revision=None, strict=True, allow_pickle=False, target=None, settings=None
) -> Checkpoint:
    """Reads and checks config and tensors; see `load_drafter` for arguments and errors."""
    folder = fetch(source, revision, allow_pickle)
    raw, tensors = read_settings(folder), read_tensors(folder, allow_pickle)
    return interpret(raw, tensors, Findings(str(source), strict), target, settings)


def interpret(raw: dict, tensors: dict, findings: Findings, target=None, settings: dict | None = None) -> Checkpoint:
    """What a checkpoint's config.json and its tensors say, whichever format they are in; see `load_drafter`."""
    try:
        reader = next(reader for reader in READERS if reader.matches(raw, set(tensors)))
        canonical, tensors = reader.read(raw, tidy(tensors, findings), findings)
        canonical = _complete(canonical, target, reader, raw, settings)
        if reader is modelopt:
            modelopt.check_embedding(target, settings, findings)
        findings.settle()
        config = DFlashConfig(**{key: value for key, value in canonical.items() if key != "auto_map"})
        tensors = split_fused(tensors, canonical, findings)
        tensors = _fitting(tensors, config, findings)
        findings.settle()
    except ValueError as error:
        raise ValueError(_named(findings.source, str(error))) from error
    return Checkpoint(reader.NAME, config, tensors)


def _named(source: str, message: str) -> str:
    return message if message.startswith(source) else f"{source}: {message}"


def _complete(canonical: dict, target, reader, raw: dict, given: dict | None) -> dict:
    """Adds what the checkpoint does not say, from `given`, from the target, or from the target that it names."""
    canonical = dict(canonical)
    nested = canonical.get("dflash_config") or {}
    for key, value in (given or {}).items():
        said = canonical.get(key, nested.get(key) if isinstance(nested, dict) else None)
        if said not in (None, value):
            raise ValueError(f"settings has {key}={value!r}, but the checkpoint says {said!r}")
        canonical[key] = value
    missing = [key for key in _OF_TARGET if canonical.get(key) is None]
    if not missing or reader in (zlab, modelopt):
        return canonical
    text = _target_config(target, reader, raw)
    if text is None:
        raise ValueError(
            f"this format ({reader.NAME}) does not say {', '.join(missing)}; pass target=..., the target model or its "
            f"config, or settings={{{missing[0]!r}: ...}}"
        )
    return {**canonical, **{key: getattr(text, _OF_TARGET[key]) for key in missing}}


def _target_config(target, reader, raw: dict):
    """The text config of the given target, or of the one that the checkpoint names if it can be found."""
    config = getattr(target, "config", target)
    if config is None and hasattr(reader, "target_name"):
        name = reader.target_name(raw)
        try:
            config = None if name is None else AutoConfig.from_pretrained(name)
        except (OSError, ValueError):
            return None
    return None if config is None else config.get_text_config(decoder=True)


def _fitting(tensors: dict, config: DFlashConfig, findings: Findings) -> dict[str, torch.Tensor]:
    """The tensors that the model has a place for; every other, missing or misshapen one is a finding."""
    with torch.device("meta"):
        expected = DFlashDraftModel(config).state_dict()
    missing, unknown = sorted(set(expected) - set(tensors)), sorted(set(tensors) - set(expected))
    if missing:
        findings.add(f"tensors that the config asks for but the files lack: {', '.join(missing)}")
    if unknown:
        findings.add(f"tensors that the config has no place for: {', '.join(unknown)}")
    fitting = {}
    for name in sorted(set(expected) & set(tensors)):
        tensor, wanted = tensors[name], expected[name]
        if tensor.shape != wanted.shape:
            findings.add(f"{name} is {list(tensor.shape)} in the file, {list(wanted.shape)} by the config")
        elif (name in _VOCABULARY) == tensor.is_floating_point():
            findings.add(f"{name} holds {tensor.dtype}, which is no form of {wanted.dtype}")
        else:
            fitting[name] = tensor.to(wanted.dtype) if name in _VOCABULARY else tensor
    return fitting


def _dtype(source, config: DFlashConfig, tensors: dict) -> torch.dtype:
    """The dtype of the weights. If they have several, the config has to choose."""
    found = {tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()}
    if len(found) == 1:
        (dtype,) = found
        if config.dtype not in (None, dtype):
            Findings(str(source)).warn(f"the config says dtype {config.dtype}, the weights are {dtype}, which is used")
        return dtype
    if config.dtype is None:
        raise ValueError(f"{source}: the weights are {', '.join(sorted(map(str, found)))}; choose a dtype")
    return config.dtype
