"""Small random models for the tests, and a drafter whose proposals are scripted."""

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from dflash import DFlashConfig, DFlashDraftModel
from dflash.modeling.sampling_dflash import DraftProposal

VOCAB, WIDTH, DEPTH, MASK = 61, 32, 4, 60
SHAPE = dict(
    hidden_size=WIDTH,
    intermediate_size=48,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=VOCAB,
    max_position_embeddings=512,
)
LAYERS = {
    "full": ["full_attention", "full_attention"],
    "sliding": ["sliding_attention", "sliding_attention"],
    "mixed": ["sliding_attention", "full_attention"],
}


def tiny_target(family="llama", seed=0, dtype=torch.float64, **changes):
    """A target in eval mode; families: llama, qwen3, qwen3_sliding (window 9 in half of the layers)."""
    torch.manual_seed(seed)
    settings = dict(
        SHAPE, num_hidden_layers=DEPTH, eos_token_id=None, bos_token_id=None, pad_token_id=0, initializer_range=0.3
    )
    if family == "qwen3_sliding":
        settings.update(use_sliding_window=True, sliding_window=9, max_window_layers=2)
    settings.update(changes)
    if family == "llama":
        return LlamaForCausalLM(LlamaConfig(**settings)).to(dtype).eval()
    return Qwen3ForCausalLM(Qwen3Config(**settings)).to(dtype).eval()


def drafter_settings(layers="full", block_size=8, **changes):
    """The config.json of a drafter for `tiny_target`, as a dictionary."""
    sliding = "sliding_attention" in LAYERS[layers]
    settings = dict(
        SHAPE,
        architectures=["DFlashDraftModel"],
        num_hidden_layers=len(LAYERS[layers]),
        num_target_layers=DEPTH,
        rms_norm_eps=1e-6,
        attention_bias=False,
        hidden_act="silu",
        layer_types=LAYERS[layers],
        use_sliding_window=sliding,
        sliding_window=6 if sliding else None,
        rope_theta=10000.0,
        block_size=block_size,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": [0, 2, 3]},
    )
    settings.update(changes)
    return settings


def tiny_drafter(layers="full", block_size=8, seed=0, dtype=torch.float64, cls=DFlashDraftModel, **changes):
    torch.manual_seed(seed)
    return cls(DFlashConfig(**drafter_settings(layers, block_size, **changes))).to(dtype).eval()


def word_tokenizer(count=VOCAB):
    """A tokenizer of `count` words: w0 (also padding and unknown), w1, ..."""
    words = Tokenizer(models.WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    tokenizer.chat_template = "{% for message in messages %}w1 {{ message['content'] }} w2 {% endfor %}"
    return tokenizer


def letter_tokenizer():
    """A tokenizer of single characters, which `StopStringCriteria` can take apart."""
    letters = Tokenizer(models.WordLevel({chr(ord("@") + i): i for i in range(61)}, unk_token="@"))
    letters.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    letters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=letters, unk_token="@")


def tiny_prompt(length, seed=0, vocab=VOCAB):
    return torch.randint(0, vocab, (1, length), generator=torch.Generator().manual_seed(seed))


def plain(target, ids, new, **settings):
    """What `generate` gives without a drafter, greedily."""
    settings = {"do_sample": False, **settings}
    return target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **settings)


class ScriptedDrafter(DFlashDraftModel):
    """Proposes a known text, wrong at a chosen slot of each round: `wrong(round)` gives the slot, or None.

    It runs the real forward, so caches and shapes are those of the real drafter; only its tokens are replaced.
    """

    def script(self, text, wrong):
        self.text, self.wrong, self.calls = text, wrong, 0
        return self

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        self.anchor_position = kwargs["cache"].start + position_ids[0, -noise_embeds.shape[1]].item()
        return super().forward(noise_embeds, context_hidden_states, position_ids, **kwargs)

    def propose(self, hidden_states, anchor, output_head, pick):
        drafted = super().propose(hidden_states, anchor, output_head, pick).tokens.shape[1]
        assert anchor.item() == self.text[0, self.anchor_position].item()
        tokens = self.text[:, self.anchor_position + 1 :][:, :drafted].clone()
        slot = self.wrong(self.calls)
        if slot is not None:
            tokens[0, slot] = (tokens[0, slot] + 1) % VOCAB
        self.calls += 1
        return DraftProposal(tokens)


class WatchedDrafter(ScriptedDrafter):
    """Keeps, for each round, where the anchor stood and the block's outputs; and the highest position used."""

    def script(self, *args):
        self.seen, self.highest = [], 0
        return super().script(*args)

    def forward(self, noise_embeds, context_hidden_states, position_ids=None, **kwargs):
        output = super().forward(noise_embeds, context_hidden_states, position_ids, **kwargs)
        self.seen.append((self.anchor_position, output.last_hidden_state))
        self.highest = max(self.highest, position_ids.max().item())
        return output
