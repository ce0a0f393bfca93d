"""`dflash list`."""

import argparse
import json


def add(commands) -> None:
    parser = commands.add_parser(
        "list",
        help="show the published drafters that are known",
        description="Show the published drafters whose configs are part of this library. The last column says whether "
        "every value was seen (certain), some follow from others (inferred), or too little is known to load it "
        "(partial); the `source.json` of each folder says which and why, and --json prints it.",
    )
    parser.add_argument("--json", action="store_true", help="one JSON array, with sources and what is not certain")


def run(arguments: dict, parser: argparse.ArgumentParser) -> int:
    from dflash.catalogue import entries

    found = entries()
    if arguments["json"]:
        print(json.dumps([as_json(entry) for entry in found], indent=2, ensure_ascii=False))
    else:
        print(table([HEADER, *(row(entry) for entry in found)]))
    return 0


HEADER = ("name", "target", "layers", "block", "taps", "window", "size", "status")


def row(entry) -> tuple[str, ...]:
    settings = entry.settings
    taps = settings.get("target_layer_ids")
    return (
        entry.name,
        entry.source["target"],
        cell(settings.get("num_hidden_layers")),
        cell(settings.get("block_size")),
        "?" if taps is None else ",".join(map(str, taps)),
        window(settings),
        "?" if entry.size is None else f"{entry.size / 2**30:.2f} GiB",
        entry.source["status"],
    )


def cell(value) -> str:
    return "?" if value is None else str(value)


def window(settings: dict) -> str:
    """The sliding window and in how many layers, as `4096 in 5 of 6`; `-` where no layer slides."""
    kinds = settings.get("layer_types")
    if kinds is None:
        return "?"
    sliding = kinds.count("sliding_attention")
    size = settings.get("sliding_window")
    return f"{cell(size)} in {sliding} of {len(kinds)}" if sliding else "-"


def table(rows: list[tuple[str, ...]]) -> str:
    """Rows of equally many cells, in columns as wide as their widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)


def as_json(entry) -> dict:
    settings = entry.settings
    keys = ("num_hidden_layers", "block_size", "target_layer_ids", "layer_types", "sliding_window", "mask_token_id")
    return {
        "name": entry.name,
        **entry.source,
        "loadable": entry.config is not None,
        "size_bytes": entry.size,
        **{key: settings.get(key) for key in keys},
    }
