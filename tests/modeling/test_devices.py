"""Offloaded, quantised and mixed-precision pairs decode as the plain ones do."""

import accelerate
import pytest
import torch

from dflash.modeling.devices_dflash import execution_device, weights_in_place
from families import build_target
from tiny import ScriptedDrafter, drafter_settings, plain, tiny_drafter, tiny_prompt, tiny_target

DFLASH_2 = {
    "architectures": ["DFlash2DraftModel"],
    "dflash_config": drafter_settings()["dflash_config"]
    | {"conv_kernel_size": 3, "conv_group_size": 8, "selector_rank": 4, "selector_top_k": 5},
}
KINDS = ["cpu", "disk"]


def offload(model, kind, folder):
    if kind == "cpu":
        return accelerate.cpu_offload(model, execution_device="cpu")
    return accelerate.disk_offload(model, folder, execution_device="cpu")


def scripted(text, layers="mixed", **changes):
    return tiny_drafter(layers, cls=ScriptedDrafter, **changes).script(text, lambda call: (None, 2, 0)[call % 3])


def assert_exact(draft, target, ids, text, **options):
    new = text.shape[1] - ids.shape[1] - 16
    output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=new, return_dict=True, **options)
    assert torch.equal(output.sequences, text[:, :-16])
    assert output.emitted.max() == draft.config.block_size
    return output


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["llama", "qwen3_sliding", "tied", "gemma3", "lfm2"])
def test_an_offloaded_target(family, kind, tmp_path):
    if family in ("gemma3", "lfm2"):
        target = build_target(family)
    else:
        target = tiny_target(family.replace("tied", "qwen3"), tie_word_embeddings=family == "tied")
    ids = tiny_prompt(12)
    text = plain(target, ids, 46)
    draft = scripted(text)
    expected = assert_exact(draft, target, ids, text)
    offload(target, kind, tmp_path)
    embedding, head = target.get_input_embeddings(), target.get_output_embeddings()
    assert embedding.weight.is_meta and head.weight.is_meta and execution_device(embedding).type == "cpu"
    output = assert_exact(scripted(text), target, ids, text, prefill_chunk_size=5)
    assert torch.equal(output.emitted, expected.emitted)
    assert embedding.weight.is_meta and head.weight.is_meta


@pytest.mark.parametrize("away", ["model.embed_tokens", "model.layers.2", "model.norm", "lm_head"])
def test_a_target_in_parts(away, tmp_path):
    """Spread by a device map: one part is offloaded, the others stay where they are."""
    target, ids = tiny_target(), tiny_prompt(12)
    text = plain(target, ids, 46)
    parts = [
        "model.embed_tokens",
        "model.rotary_emb",
        "model.norm",
        "lm_head",
        *(f"model.layers.{i}" for i in range(4)),
    ]
    device_map = {part: "disk" if part == away else "cpu" for part in parts}
    accelerate.dispatch_model(target, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True)
    assert any(parameter.is_meta for parameter in target.get_submodule(away).parameters())
    assert_exact(scripted(text), target, ids, text)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("changes", [{}, DFLASH_2], ids=["dflash", "dflash2"])
def test_an_offloaded_drafter(changes, kind, tmp_path):
    target, ids = tiny_target(), tiny_prompt(12)
    text = plain(target, ids, 46)
    draft = offload(scripted(text, **changes), kind, tmp_path)
    assert draft.fc.weight.is_meta
    assert_exact(draft, target, ids, text, draft_context_window=20, prefill_chunk_size=5)


def test_offloading_changes_no_number_of_the_draft(tmp_path):
    """By value: the drafter's outputs and tokens, with target and drafter both offloaded."""
    outputs, ids = [], tiny_prompt(12)
    for offloaded in (False, True):
        target, draft = tiny_target(), tiny_drafter("mixed", **DFLASH_2)
        hidden = []
        if offloaded:
            accelerate.cpu_offload(target, execution_device="cpu")
            offload(draft, "disk", tmp_path)
        draft.norm.register_forward_hook(lambda module, inputs, output, hidden=hidden: hidden.append(output))
        result = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=12, return_dict=True)
        outputs.append((result.sequences, result.emitted, torch.cat(hidden)))
    for plain_value, offloaded_value in zip(*outputs, strict=True):
        assert torch.equal(plain_value, offloaded_value)


def test_weights_are_in_place_only_within():
    target = tiny_target()
    module = target.get_input_embeddings()
    rows = module.weight.detach().clone()
    accelerate.cpu_offload(target, execution_device="cpu")
    with pytest.raises(ZeroDivisionError), weights_in_place(module):
        assert torch.equal(module.weight, rows)
        1 / 0  # noqa: B018
    assert module.weight.is_meta


def greedy_gaps(target, sequences, prompt):
    """How far each new token's logit is below the highest, by one forward in the target's own precision."""
    with torch.no_grad():
        logits = target(sequences).logits[0, prompt - 1 : -1].float()
    chosen = logits.gather(-1, sequences[0, prompt:, None])[:, 0]
    return logits.amax(-1) - chosen


@pytest.mark.parametrize("draft_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_mixed_precision(dtype, draft_dtype):
    """Features, noise and hidden states cross each border in the other side's dtype; only ties may round otherwise."""
    target, ids = tiny_target(dtype=dtype), tiny_prompt(12)
    draft = tiny_drafter("mixed", dtype=draft_dtype, **DFLASH_2)
    inputs = []
    draft.fc.register_forward_pre_hook(lambda module, args: inputs.append(args[0].dtype))
    output = draft.spec_generate(
        target=target, input_ids=ids, max_new_tokens=24, prefill_chunk_size=5, temperature=0.0, return_dict=True
    )
    assert set(inputs) == {draft_dtype} and output.emitted.sum() == 23
    assert greedy_gaps(target, output.sequences, 12).max() <= 64 * torch.finfo(dtype).eps
    sampled = draft.spec_generate(
        target=target, input_ids=ids, max_new_tokens=9, temperature=1.0, draft_temperature=1.0
    )
    assert sampled.shape == (1, 21)


def quantised(model):
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


def test_a_quantised_drafter():
    """Its linear layers have no weight tensor."""
    target, ids = tiny_target(), tiny_prompt(12)
    text = plain(target, ids, 46)
    draft = quantised(tiny_drafter("mixed", cls=ScriptedDrafter, dtype=torch.float32))
    assert not isinstance(draft.fc.weight, torch.Tensor)
    draft.script(text, lambda call: (None, 2, 0)[call % 3])
    assert_exact(draft, target, ids, text)


def test_a_quantised_target():
    """Its activations are scaled by all tokens of a forward, so only one token at a time can equal `generate`."""
    target, ids = quantised(tiny_target(dtype=torch.float32)), tiny_prompt(12)
    assert not isinstance(target.get_output_embeddings().weight, torch.Tensor)
    draft = tiny_drafter("mixed")
    output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=20, block_size=1)
    assert torch.equal(output, plain(target, ids, 20))
    output = draft.spec_generate(target=target, input_ids=ids, max_new_tokens=20, return_dict=True)
    assert output.emitted.sum() == 19 and output.sequences.shape == (1, 32)
