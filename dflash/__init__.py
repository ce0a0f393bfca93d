"""DFlash speculative decoding for Hugging Face Transformers."""
