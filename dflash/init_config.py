"""`dflash init-config`: a config for a new drafter, to look at, edit and train with."""

from dataclasses import dataclass
from pathlib import Path

from transformers import AutoConfig, AutoTokenizer

from dflash import demo
from dflash.loading import say
from dflash.training.drafter_config import drafter_config


@dataclass(frozen=True, kw_only=True)
class InitConfigOptions:
    """What the command line asks for; `target` is a folder or a Hub repository."""

    target: str | None = None
    demo: bool = False
    revision: str | None = None
    output: str | None = None
    layers: int = 5
    block_size: int = 16
    taps: list[int] | int = 5
    mask_token_id: int | None = None
    sliding_window: int | None = None


def run(options: InitConfigOptions) -> int:
    """Runs the command; 0."""
    name = str(demo.demo_target(say)) if options.demo else options.target
    config = drafter_config(
        AutoConfig.from_pretrained(name, revision=options.revision),
        AutoTokenizer.from_pretrained(name, revision=options.revision),
        layers=options.layers,
        block_size=options.block_size,
        taps=options.taps,
        mask_token_id=options.mask_token_id,
        sliding_window=options.sliding_window,
    )
    text = config.to_json_string()
    if not options.output:
        print(text, end="")
        return 0
    path = Path(options.output)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("x", encoding="utf-8") as file:
        file.write(text)
    return 0
