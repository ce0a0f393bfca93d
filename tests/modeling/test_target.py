"""A target that does not fit the drafter, or that cannot be rolled back, is refused with a reason."""

import pytest
import torch
import transformers

from tiny import DEPTH, VOCAB, WIDTH, drafter_settings, plain, tiny_drafter, tiny_prompt, tiny_target

REFUSED = {
    "width": (lambda: tiny_target(hidden_size=64), f"hidden_size is {WIDTH}.*64"),
    "depth": (lambda: tiny_target(num_hidden_layers=DEPTH + 2), f"num_target_layers is {DEPTH}.*{DEPTH + 2}"),
    "vocabulary": (lambda: tiny_target(vocab_size=VOCAB + 1), f"vocab_size is {VOCAB}.*{VOCAB + 1}"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pairs_that_do_not_belong_together(case):
    build, message = REFUSED[case]
    with pytest.raises(ValueError, match=message):
        tiny_drafter().spec_generate(target=build(), input_ids=tiny_prompt(3), max_new_tokens=2)


def encoder_decoder():
    config = transformers.T5Config(
        d_model=WIDTH, d_ff=32, num_layers=2, num_heads=2, vocab_size=VOCAB, decoder_start_token_id=0
    )
    return transformers.T5ForConditionalGeneration(config)


def headless():
    config = transformers.LlamaConfig(hidden_size=WIDTH, num_hidden_layers=2, num_attention_heads=2, vocab_size=VOCAB)
    return transformers.LlamaModel(config)


@pytest.mark.parametrize(
    ("build", "message"), [(encoder_decoder, "decoder-only"), (headless, "language model head|AutoModelForCausalLM")]
)
def test_models_that_are_no_targets(build, message):
    with pytest.raises(ValueError, match=message):
        tiny_drafter().spec_generate(target=build(), input_ids=tiny_prompt(3), max_new_tokens=2)


class Forgetful(transformers.LlamaForCausalLM):
    """Never uses the cache it is given."""

    def forward(self, *args, cache=None, past_key_values=None, **kwargs):
        return super().forward(*args, **{**kwargs, "use_cache": False})


def test_a_target_that_fills_no_cache_is_noticed():
    target = Forgetful(tiny_target().config).double()
    with pytest.raises(ValueError, match="from 0 to 0 positions on 3 tokens"):
        tiny_drafter().spec_generate(target=target, input_ids=tiny_prompt(3), max_new_tokens=9)


def test_embedding_scale_and_logit_changes_keep_the_output_exact():
    dflash = {**drafter_settings()["dflash_config"], "input_embedding_scale": 5.5}
    dflash |= {"output_multiplier": 0.5, "final_logit_softcapping": 3.0}
    target, ids = tiny_target(), tiny_prompt(9)
    output = tiny_drafter(dflash_config=dflash).spec_generate(target=target, input_ids=ids, max_new_tokens=20)
    assert torch.equal(output, plain(target, ids, 20))
