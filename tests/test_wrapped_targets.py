"""Targets inside something else: real PEFT adapters, compiled modules, and classes that Transformers does not know."""

import pytest
import torch
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from test_target_families import BLOCK, assert_exact, build_draft, plain_tokens, prompt_ids
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from dflash.modeling.pairing_dflash import check_pair
from families import build_target


def lora(target):
    """An adapter that changes what the target says; new ones start as nothing."""
    torch.manual_seed(1)
    wrapped = get_peft_model(target, LoraConfig(r=2, target_modules=["q_proj", "v_proj"])).double().eval()
    for name, parameter in wrapped.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.5)
    return wrapped


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_an_adapter(family):
    target = lora(build_target(family))
    ids = torch.arange(9)[None]
    with torch.no_grad(), target.disable_adapter():
        without = target(input_ids=ids).logits
    assert (target(input_ids=ids).logits - without).abs().max() > 0.01
    assert_exact(target, 9)


def test_an_adapter_that_lengthens_the_prompt_is_refused():
    target = get_peft_model(build_target("llama"), PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))
    with pytest.raises(ValueError, match="virtual tokens"):
        check_pair(build_draft().config, target)


class _Remote(PreTrainedModel):
    """As vision models with remote code are built: a language model of another class, under a name of its own."""

    config_class = LlamaConfig

    def __init__(self, config, language_model):
        super().__init__(config)
        self.vision_tower = torch.nn.Linear(3, 3)
        self.language_model = language_model
        self.post_init()

    def get_input_embeddings(self):
        return self.language_model.get_input_embeddings()

    def get_output_embeddings(self):
        return self.language_model.get_output_embeddings()

    def get_decoder(self):
        return self.language_model.get_decoder()

    def forward(self, input_ids=None, pixel_values=None, past_key_values=None, **kwargs):
        name = "cache" if "cache" in LlamaForCausalLM.forward.__annotations__ else "past_key_values"
        return self.language_model(input_ids=input_ids, **{name: past_key_values}, **kwargs)

    def generate(self, *args, **kwargs):
        return self.language_model.generate(*args, **kwargs)


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_5"])
def test_a_class_that_transformers_does_not_know(family):
    """Kimi K2.5's shape: DeepSeek-V3 within a wrapper of its own, whose forward keeps the cache's older name."""
    language_model = build_target(family)
    assert_exact(_Remote(language_model.config, language_model).double().eval(), 9)


def compiled(target, way):
    if way == "wrapped":
        return torch.compile(target, backend="eager")
    if way == "forward":
        target.forward = torch.compile(target.forward, backend="eager")
    else:
        target.model.layers[1] = torch.compile(target.model.layers[1], backend="eager")
    return target


@pytest.mark.parametrize("way", ["wrapped", "forward", "one layer"])
def test_a_compiled_target(way):
    """By Dynamo alone, which has to see hooks and cache as they are."""
    kinds = ["sliding_attention", "full_attention"]
    target = build_target("qwen2_sliding", num_hidden_layers=2, layer_types=kinds)
    ids = prompt_ids(9, seed=0)
    reference = plain_tokens(target, ids, 14)
    taps = {"block_size": BLOCK, "mask_token_id": 3, "target_layer_ids": [0, 1]}
    draft = build_draft(num_target_layers=2, dflash_config=taps).follow(reference, [1, BLOCK - 1, 0])
    output = draft.spec_generate(
        target=compiled(target, way), input_ids=ids, max_new_tokens=9, stop_token_ids=[], return_dict=True
    )
    assert output.sequences[0, 9:].tolist() == reference[:9]
    assert output.emitted[0].tolist() == [2, 5, 1]


def test_layers_that_give_no_vector_per_token_are_refused():
    """Gemma 3n's keep several streams, which no drafter was made for."""
    target = build_target("llama")
    target.model.layers[0].register_forward_hook(lambda module, args, output: output[None].expand(2, -1, -1, -1)[0:2])
    target.model.layers[1].register_forward_pre_hook(lambda module, args: (args[0][0], *args[1:]))
    with pytest.raises(ValueError, match=r"layer 0 gives \[2, 1, 9, 32\]"):
        assert_exact(target, 9)
