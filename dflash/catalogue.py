"""The catalogue: one folder of `hub_configs/` for each published drafter.

A folder holds `source.json`, and `config.json` if every value that changes the drafter is known. `source.json` has

- `repository`, `revision` (None: not known) and `target`;
- `status`: "certain"; "inferred", if some values were not seen but follow from others; "partial", if it has no config;
- `sources`: where the values come from; `uncertain`: what is inferred or unknown, and why; `changed`: what differs from
  the published config on purpose;
- `published`: what is known of the published weights (`tensors`, `parameters`, `file_bytes`, `file_gib`);
- `known`, instead of a config: the keys that are known of a partial one.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import dflash.hub_configs

FOLDER = Path(dflash.hub_configs.__path__[0])
STATUSES = ("certain", "inferred", "partial")
GIB = 2**30


@dataclass(frozen=True)
class Entry:
    """One drafter of the catalogue: the name of its folder, its source.json, and its config.json or None."""

    name: str
    source: dict
    config: dict | None

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    @property
    def settings(self) -> dict:
        """What is known of the drafter, with the DFlash keys at top level: all of its config, or a part of it."""
        config = self.source.get("known", {}) if self.config is None else self.config
        return {**config, **config.get("dflash_config", {})}

    @property
    def size(self) -> int | None:
        """Bytes of the weights in bfloat16, or of the published file if they cannot be computed; None: not known."""
        if self.config is not None:
            return 2 * parameter_count(self.settings)
        published = self.source.get("published", {}).get("file_gib")
        return None if published is None else round(published * GIB)


def entries() -> list[Entry]:
    """Every drafter of the catalogue, by name."""
    return [read_entry(path.parent) for path in sorted(FOLDER.glob("*/source.json"))]


def find_entry(name: str) -> Entry | None:
    """The drafter whose folder is called `name`, if there is one."""
    return next((entry for entry in entries() if entry.name == name), None)


def read_entry(folder: Path) -> Entry:
    config = folder / "config.json"
    return Entry(folder.name, _read(folder / "source.json"), _read(config) if config.exists() else None)


def _read(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def parameter_count(settings: dict) -> int:
    """Parameters of a drafter whose DFlash keys are at top level, by arithmetic: nothing is built."""
    layers, width, head = settings["num_hidden_layers"], settings["hidden_size"], settings["head_dim"]
    queries, keys = head * settings["num_attention_heads"], head * settings["num_key_value_heads"]
    attention = 2 * width * (queries + keys) + 2 * head
    if settings["attention_bias"]:
        attention += queries + 2 * keys + width
    layer = attention + 3 * width * settings["intermediate_size"] + 2 * width
    outside = len(settings["target_layer_ids"]) * width**2 + 2 * width
    if settings.get("selector_rank") is not None:
        taps = 2 * settings["conv_kernel_size"]
        layer += 2 * (taps * width + taps * width // settings["conv_group_size"] * width)
        outside += settings["selector_rank"] * (width + 2 * settings["vocab_size"])
    return layers * layer + outside
