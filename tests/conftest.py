import pytest
import torch

from dflash.checkpoint import write_checkpoint
from tiny import tiny_drafter, tiny_target, word_tokenizer

# The models are tiny: more threads only fight each other.
torch.set_num_threads(1)


@pytest.fixture(scope="session")
def pair(tmp_path_factory):
    """Command-line options of a tiny pair: a target (float32) with its tokenizer, and its drafter."""
    root = tmp_path_factory.mktemp("pair")
    word_tokenizer().save_pretrained(root / "target")
    tiny_target(dtype=torch.float32).save_pretrained(root / "target")
    write_checkpoint(tiny_drafter(dtype=torch.float32), root / "draft")
    return ["--target", str(root / "target"), "--draft", str(root / "draft"), "--device", "cpu"]
