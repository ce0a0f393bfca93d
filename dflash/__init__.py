"""DFlash speculative decoding for Hugging Face Transformers."""

from dflash.dialects import load_drafter
from dflash.modeling.configuration_dflash import DFlashConfig
from dflash.modeling.modeling_dflash import DFlashDraftModel

__version__ = "0.1.0"
__all__ = ["DFlashConfig", "DFlashDraftModel", "load_drafter"]
