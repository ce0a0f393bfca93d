"""A language of one rule, x_{t+1} = f(x_t), a target that speaks it, and texts of it."""

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from dflash import DFlashConfig, DFlashDraftModel
from dflash.training.config import TrainConfig
from dflash.training.documents import Document
from dflash.training.features import OnlineFeatures
from tiny import drafter_settings

WORDS, MASK, WIDTH = 20, 20, 32
RULE = torch.randperm(WORDS, generator=torch.Generator().manual_seed(5))


def speak(first: int, length: int) -> torch.Tensor:
    tokens = [first]
    while len(tokens) < length:
        tokens.append(int(RULE[tokens[-1]]))
    return torch.tensor(tokens)


def toy_documents(count: int = 40, length: int = 24) -> list[Document]:
    mask = torch.arange(length) >= 3
    return [Document(f"toy-{i}", speak(i % WORDS, length + i % 3)[:length], mask) for i in range(count)]


@torch.no_grad()
def toy_target() -> LlamaForCausalLM:
    """Its layers add nothing to orthogonal embeddings, and its head looks the rule up."""
    config = LlamaConfig(
        vocab_size=WORDS + 1,
        hidden_size=WIDTH,
        intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    target = LlamaForCausalLM(config)
    for layer in target.model.layers:
        layer.self_attn.o_proj.weight.zero_()
        layer.mlp.down_proj.weight.zero_()
    rows = torch.linalg.qr(torch.randn(WIDTH, WIDTH)).Q[: WORDS + 1]
    target.model.embed_tokens.weight.copy_(rows)
    target.lm_head.weight.zero_()
    target.lm_head.weight[RULE] = rows[:WORDS]
    return target.eval()


def toy_drafter(block_size: int = 4, layers: str = "full", seed: int = 0, **changes) -> DFlashDraftModel:
    torch.manual_seed(seed)
    settings = drafter_settings(
        layers,
        block_size,
        **{
            "vocab_size": WORDS + 1,
            "num_target_layers": 2,
            "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [0, 1]},
            **changes,
        },
    )
    return DFlashDraftModel(DFlashConfig(**settings))


def toy_source(target) -> OnlineFeatures:
    return OnlineFeatures(target, [0, 1], last_hidden=True)


def toy_config(output, **changes) -> TrainConfig:
    settings = dict(
        target="toy",
        documents="toy",
        draft_config="toy",
        output=str(output),
        cpu=True,
        batch_size=8,
        micro_batch_size=8,
        max_steps=6,
        learning_rate=3e-3,
        log_every=2,
        save_every=1000,
        save_dtype="float32",
    )
    return TrainConfig(**{**settings, **changes})
