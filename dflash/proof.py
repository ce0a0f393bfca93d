"""Proof that a checkpoint folder works by itself: a fresh process without this library loads it and runs it."""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import save_file

# A whole target is run too, if its random embedding stays below this many numbers.
_SMALL = 50_000_000
_CONTEXT = 5

PROGRAM = """
import sys
sys.modules["dflash"] = None  # importing it fails from here on
import torch
from safetensors.torch import load_file
from transformers import AutoModel, Qwen3Config, Qwen3ForCausalLM

folder, data, small = sys.argv[1], load_file(sys.argv[2]), sys.argv[3] == "small"
draft = AutoModel.from_pretrained(folder, trust_remote_code=True, dtype="auto").eval()
assert type(draft).__module__.startswith("transformers_modules."), f"loaded {type(draft)}, not the shipped class"
with torch.inference_mode():
    found = draft(noise_embeds=data["noise"], context_hidden_states=data["features"]).last_hidden_state
assert found.isfinite().all(), "its outputs are not finite"
scale, error = data["expected"].abs().max().item(), (found - data["expected"]).abs().max().item()
assert error <= 16 * torch.finfo(found.dtype).eps * scale, f"its outputs are {error} away, of {scale}"
if small:
    config = draft.config
    shape = dict(hidden_size=config.hidden_size, vocab_size=config.vocab_size)
    shape["num_hidden_layers"] = config.num_target_layers
    tiny = dict(intermediate_size=8, num_attention_heads=1, num_key_value_heads=1, head_dim=8, eos_token_id=None)
    target = Qwen3ForCausalLM(Qwen3Config(**shape, **tiny, tie_word_embeddings=True)).to(draft.dtype).eval()
    ids = torch.tensor([[1, 2, 3]])
    output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=12, return_dict=True)
    assert output.sequences.shape == (1, 15) and output.emitted.shape[1] > 0, output.sequences.shape
    text = target.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=4,
        do_sample=False,
        custom_generate=folder,
        trust_remote_code=True,
        assistant_model=draft,
    )
    assert text.shape == (1, 7), text.shape
"""


def prove(folder: Path, draft) -> None:
    """Raises `RuntimeError`, with what happened, unless `folder` loads by itself and gives the outputs of `draft`.

    Where a random target of its shape is small, the fresh process also decodes with it.

    Args:
        folder (`Path`): a checkpoint folder.
        draft (`DFlashDraftModel`): the model that the folder was written from, on any device.
    """
    config = draft.config
    with tempfile.TemporaryDirectory(prefix="dflash-proof-") as scratch:
        data = Path(scratch) / "data.safetensors"
        save_file(_inputs_and_outputs(draft), data)
        small = config.vocab_size * config.hidden_size <= _SMALL
        # The modules' cache is the process's own: what is left there by another checkpoint must not help.
        environment = {**os.environ, "HF_HUB_OFFLINE": "1", "HF_MODULES_CACHE": scratch, "PYTHONSAFEPATH": "1"}
        command = [sys.executable, "-c", PROGRAM, str(folder.resolve()), str(data), "small" if small else "large"]
        result = subprocess.run(command, cwd=scratch, env=environment, capture_output=True, text=True)
    if result.returncode:
        last = result.stderr.strip().splitlines()[-12:]
        raise RuntimeError("the checkpoint does not work by itself, so it is not used:\n" + "\n".join(last))


def _inputs_and_outputs(draft) -> dict[str, torch.Tensor]:
    """A block [1, B, H] and features [1, n, K*H], and what the drafter makes of them on the CPU."""
    config, dice = draft.config, torch.Generator().manual_seed(0)
    shapes = {
        "noise": (1, config.block_size, config.hidden_size),
        "features": (1, _CONTEXT, len(config.target_layer_ids) * config.hidden_size),
    }
    device, training = draft.device, draft.training
    data = {name: torch.randn(shape, generator=dice).to(draft.dtype) for name, shape in shapes.items()}
    draft = draft.to("cpu").eval()
    try:
        with torch.no_grad():
            output = draft(noise_embeds=data["noise"], context_hidden_states=data["features"])
    finally:
        draft.to(device).train(training)
    return {**data, "expected": output.last_hidden_state}
