"""The files that ship inside every DFlash checkpoint; installed as `dflash.modeling`."""
