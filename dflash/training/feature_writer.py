"""Writing features to disk: safetensors shards and an index that says exactly what they were made from.

`index.json` holds the whole plan and is written first; a shard appears under its name only when it is complete. So a
run that was interrupted goes on with the shards that are missing.
"""

import json
import os
import shutil
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors.torch import save_file

from dflash.loading import say
from dflash.training.documents import Document
from dflash.training.feature_index import DTYPES, FeatureIndex, Shard, missing_shards, read_index
from dflash.training.identity import differences, identify

SHARD_BYTES = 1 << 30


def write_features(
    source,
    documents: list[Document],
    folder,
    dtype: str = "bfloat16",
    tokenizer=None,
    shard_bytes: int = SHARD_BYTES,
    report=say,
) -> Path:
    """Writes the features of documents to a folder, or what is missing there of an interrupted run.

    Args:
        source (`OnlineFeatures`): what makes them.
        documents: with unique ids.
        folder: new, or of an earlier run with the same arguments.
        dtype: of the stored states: bfloat16, float16 or float32.
        tokenizer (*optional*): the target's; its hash is stored and checked.
        shard_bytes: about how large a file becomes.
        report: called with each line of text about size and progress.

    Raises:
        ValueError: the folder holds something else, the disk is too small, or a state does not fit `dtype`.
    """
    folder = Path(folder)
    index = plan(source, documents, dtype, tokenizer, shard_bytes)
    _check_folder(folder, index)
    todo = missing_shards(folder, index)
    _check_space(folder, index, todo, report)
    folder.mkdir(parents=True, exist_ok=True)
    _replace(folder / "index.json", lambda path: path.write_text(json.dumps(asdict(index)), encoding="utf-8"))
    by_id = {document.id: document for document in documents}
    for shard in todo:
        tensors = _make(source, [by_id[id] for id in shard.ids], DTYPES[dtype])
        _replace(folder / shard.file, lambda path, tensors=tensors: save_file(tensors, path))
        report(f"wrote {shard.file}, {index.shards.index(shard) + 1} of {len(index.shards)}")
    return folder


def plan(source, documents: list[Document], dtype: str, tokenizer, shard_bytes: int) -> FeatureIndex:
    """The index of what `write_features` will write; the same arguments always give the same plan."""
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    if len({document.id for document in documents}) < len(documents):
        raise ValueError("documents have the same id more than once; features are found by id")
    width = source.model.config.get_text_config(decoder=True).hidden_size
    normed = True if source.last_hidden else None
    made_from = identify(source.target, tokenizer)
    index = FeatureIndex(source.tap_ids, width, dtype, normed, made_from, [])
    tokens = max(1, shard_bytes // index.bytes_per_token)
    groups: list[list[Document]] = []
    for document in documents:
        if not groups or sum(map(len, groups[-1])) + len(document) > tokens:
            groups.append([])
        groups[-1].append(document)
    for number, group in enumerate(groups):
        ids, lengths = [document.id for document in group], [len(document) for document in group]
        index.shards.append(Shard(f"features-{number:05d}.safetensors", ids, lengths))
    return index


def _check_folder(folder: Path, index: FeatureIndex) -> None:
    if not folder.exists() or all(path.suffix == ".new" for path in folder.iterdir()):
        return
    if not (folder / "index.json").exists():
        raise ValueError(f"{folder} is not empty and holds no feature cache; choose another folder")
    found = read_index(folder)
    problems = differences(found.made_from, index.made_from)
    for name in ("target_layer_ids", "dtype", "last_hidden_is_normed"):
        if getattr(found, name) != getattr(index, name):
            problems.append(f"{name} is {getattr(found, name)}, asked for {getattr(index, name)}")
    if found.shards != index.shards:
        problems.append("its documents, or how they are spread over files, are others")
    if problems:
        raise ValueError(f"{folder} holds another feature cache ({'; '.join(problems)}); choose another folder")


def _check_space(folder: Path, index: FeatureIndex, todo: list[Shard], report) -> None:
    tokens = sum(sum(shard.lengths) for shard in index.shards)
    size, needed = index.size(index.shards), index.size(todo)
    report(
        f"features of {tokens} tokens: {index.bytes_per_token} bytes each in {index.dtype}, {_size(size)} in "
        f"{len(index.shards)} files; {_size(needed)} to write"
    )
    place = next(parent for parent in (folder.absolute(), *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(place).free
    if needed > free:
        raise ValueError(
            f"the features need {_size(needed)}, but {place} has {_size(free)} free; use fewer documents or taps, a "
            "smaller dtype, another disk, or no cache at all"
        )


def _make(source, documents: list[Document], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """The tensors of one shard."""
    columns: dict[str, list[torch.Tensor]] = {"features": [], "last_hidden": []}
    for document, state in zip(documents, source(documents), strict=True):
        for name, column in columns.items():
            values = getattr(state, name)
            if values is None:
                continue
            column.append(values.to("cpu", dtype))
            if not column[-1].isfinite().all():
                raise ValueError(
                    f"{name} of document {document.id!r} has values that {dtype} cannot hold (largest "
                    f"{values.abs().max().item():.3g}); choose another dtype, or leave the document out"
                )
    tensors = {name: torch.cat(column) for name, column in columns.items() if column}
    return {"input_ids": torch.cat([document.input_ids for document in documents]), **tensors}


def _replace(path: Path, write) -> None:
    """Writes a file beside `path`, to the disk, and moves it there: a reader, or a crash, sees all of it or none."""
    staged = path.with_name(f".{path.name}.new")
    try:
        write(staged)
        with staged.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(staged, path)
    finally:
        staged.unlink(missing_ok=True)


def _size(size: int) -> str:
    scale, unit = next((pair for pair in ((1e9, "GB"), (1e6, "MB")) if size >= pair[0]), (1e3, "kB"))
    return f"{size / scale:.1f} {unit}"
