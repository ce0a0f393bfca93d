"""Reading a checkpoint's files: config.json and its weights, whole or in shards, local or from the Hub."""

import json
from pathlib import Path

import torch
from huggingface_hub import snapshot_download
from safetensors.torch import load_file

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"


def fetch(source, revision: str | None = None, allow_pickle: bool = False) -> Path:
    """The folder of a checkpoint: `source` itself if it is one, else the Hub's repository, config and weights only.

    Raises:
        FileNotFoundError: `source` looks like a path, and there is nothing.
    """
    folder = Path(source)
    if folder.is_dir():
        return folder
    if folder.is_absolute() or str(source).startswith(".") or str(source).count("/") != 1:
        raise FileNotFoundError(f"{source} is neither a folder nor the name of a repository on the Hub")
    patterns = [CONFIG, "*.safetensors", INDEX, *([f"{PICKLED}*", "pytorch_model*.bin"] if allow_pickle else [])]
    return Path(snapshot_download(str(source), revision=revision, allow_patterns=patterns))


def read_settings(folder: Path) -> dict:
    """config.json as a dictionary.

    Raises:
        FileNotFoundError: there is none.
        ValueError: it is not a JSON object, or names a key twice.
    """
    path = folder / CONFIG
    if not path.exists():
        raise FileNotFoundError(f"{folder} has no {CONFIG}")
    try:
        settings = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_without_repetition)
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(settings, dict):
        raise ValueError(f"{path} must hold an object, it holds {type(settings).__name__}")
    return settings


def _without_repetition(pairs: list) -> dict:
    keys = [key for key, _ in pairs]
    twice = sorted({key for key in keys if keys.count(key) > 1})
    if twice:
        raise ValueError(f"{CONFIG} names {', '.join(twice)} more than once")
    return dict(pairs)


def read_tensors(folder: Path, allow_pickle: bool = False) -> dict[str, torch.Tensor]:
    """All tensors by the names in the files; `model.safetensors` comes before an index, as in Transformers.

    Raises:
        FileNotFoundError: a file of the weights is missing.
        ValueError: index and shards disagree, or the weights are pickled and `allow_pickle` is false.
    """
    if (folder / WEIGHTS).exists():
        return load_file(folder / WEIGHTS)
    if (folder / INDEX).exists():
        return _read_shards(folder)
    found = sorted(path.name for path in folder.glob("*.safetensors"))
    if len(found) > 1:
        raise ValueError(
            f"{folder} has {len(found)} files of weights ({', '.join(found)}) but neither {WEIGHTS} nor {INDEX}"
        )
    if found:
        return load_file(folder / found[0])
    pickled = sorted(folder.glob("pytorch_model*.bin"))
    if not pickled:
        raise FileNotFoundError(f"{folder} has no weights: neither {WEIGHTS} nor {INDEX}")
    if not allow_pickle:
        raise ValueError(
            f"{folder} has pickled weights only ({pickled[0].name}), which can run code when they are read; convert "
            "them to safetensors, or pass allow_pickle=True (they are then read with weights_only=True)"
        )
    return _merged({path.name: torch.load(path, map_location="cpu", weights_only=True) for path in pickled})


def _read_shards(folder: Path) -> dict[str, torch.Tensor]:
    index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
    places = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(places, dict) or not all(isinstance(name, str) for name in places.values()):
        raise ValueError(f"{folder / INDEX} has no weight_map from tensors to files")
    names = sorted(set(places.values()))
    for name in names:
        if Path(name).name != name or not name.endswith(".safetensors"):
            raise ValueError(f"{INDEX} names {name!r}, which is not a .safetensors file of the folder itself")
        if not (folder / name).exists():
            raise FileNotFoundError(f"{INDEX} names {name}, which {folder} does not have")
    shards = {name: load_file(folder / name) for name in names}
    tensors = _merged(shards)
    for tensor, name in places.items():
        if tensor not in shards[name]:
            raise ValueError(f"{INDEX} says that {tensor} is in {name}; it is not there")
    unlisted = sorted(set(tensors) - set(places))
    if unlisted:
        raise ValueError(f"{INDEX} does not list {', '.join(unlisted)}, which its files hold")
    return tensors


def _merged(shards: dict[str, dict]) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for name, shard in shards.items():
        twice = sorted(set(shard) & set(tensors))
        if twice:
            raise ValueError(f"{', '.join(twice)}: in {name} and in another file too")
        tensors.update(shard)
    return tensors
