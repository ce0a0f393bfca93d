"""The formats in which drafters are published, read into the one that this library uses, and written from it.

Each format is a module with a `NAME`, `matches(settings, names)` and `read(settings, tensors, findings)`. Tensors keep
z-lab's names, which all of them share but for a few.
"""

from dflash.dialects.reading import load_drafter, read_checkpoint

__all__ = ["load_drafter", "read_checkpoint"]
