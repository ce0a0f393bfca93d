"""Tiny targets with drafters that are partly right, and damaged copies of those drafters."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM

from dflash import DFlashConfig, DFlashDraftModel
from dflash.checkpoint import write_checkpoint

from .verdict import Rounds

VOCAB, MASK, LAYERS, TAPS, BLOCK, WINDOW = 128, 127, 6, [1, 2, 4], 8, 16
NEW = 48  # tokens that every prompt is continued by
PROMPT_LENGTHS = (3, 12, 33, 70)  # shorter than a window, and longer than several
SHAPE = dict(
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=32,  # the smallest that vLLM's CPU attention takes
    vocab_size=VOCAB,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
)
TARGETS = {"llama": (LlamaConfig, LlamaForCausalLM), "qwen3": (Qwen3Config, Qwen3ForCausalLM)}
ENOUGH_ACCEPTED, MOST_STEPS = 0.35, 1500


class RecordingDrafter(DFlashDraftModel):
    """A drafter that keeps what it proposed."""

    def propose(self, *args, **kwargs):
        proposal = super().propose(*args, **kwargs)
        self.proposed.append(proposal.tokens[0].tolist())
        return proposal


def decode(draft: RecordingDrafter, target: PreTrainedModel, prompt: list[int], new: int, block: int) -> Rounds:
    """Greedy `spec_generate`, for every round that begins before `new` tokens are there.

    The budget is larger than `new`, so that none of these rounds is cut short: a server does not cut them either, it
    only returns fewer tokens.
    """
    draft.proposed = []
    output = draft.spec_generate(
        target=target,
        input_ids=torch.tensor([prompt]),
        max_new_tokens=new + block,
        stop_token_ids=[],
        block_size=block,
        return_dict=True,
    )
    drafts, accepted, emitted = [], [], 1
    for proposed, count in zip(draft.proposed, output.emitted[0].tolist(), strict=False):
        if emitted >= new:
            break
        drafts.append(proposed)
        accepted.append(count - 1)
        emitted += count
    return Rounds(output.sequences[0, len(prompt) :][:new].tolist(), drafts, accepted)


def tiny_target(kind: str) -> PreTrainedModel:
    config, model = TARGETS[kind]
    torch.manual_seed(1)
    ends = dict(eos_token_id=None, bos_token_id=None, pad_token_id=0)
    settings = dict(SHAPE, num_hidden_layers=LAYERS, initializer_range=0.2, tie_word_embeddings=False, **ends)
    return model(config(**settings)).eval()


def tiny_prompts() -> list[list[int]]:
    random = torch.Generator().manual_seed(2)
    return [torch.randint(0, MASK, (length,), generator=random).tolist() for length in PROMPT_LENGTHS]


def tiny_drafter(same_k_norm: bool = False, **changes) -> DFlashDraftModel:
    """A random drafter whose norms differ in every weight, so that none can be mistaken for another.

    Args:
        same_k_norm: give all layers the same K-norm.
        changes: keys of config.json.
    """
    settings = dict(
        SHAPE,
        architectures=["DFlashDraftModel"],
        num_hidden_layers=2,
        num_target_layers=LAYERS,
        attention_bias=False,
        hidden_act="silu",
        layer_types=["full_attention"] * 2,
        use_sliding_window=False,
        rope_theta=10000.0,
        block_size=BLOCK,
        dflash_config={"mask_token_id": MASK, "target_layer_ids": TAPS},
    )
    torch.manual_seed(3)
    draft = DFlashDraftModel(DFlashConfig(**{**settings, **changes})).eval()
    for name, parameter in draft.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.3, 1.7)
    if same_k_norm:
        draft.layers[1].self_attn.k_norm.load_state_dict(draft.layers[0].self_attn.k_norm.state_dict())
    return draft


def train(draft: DFlashDraftModel, target: PreTrainedModel, prompts: list[list[int]]) -> None:
    """Teaches a drafter the target's own continuations of `prompts`, until it is right about some of them.

    Norms keep their random weights. Raises `RuntimeError` if too little is accepted after `MOST_STEPS`.
    """
    texts = [read(target, prompt) for prompt in prompts]
    learning = [parameter for name, parameter in draft.named_parameters() if "norm" not in name]
    optimizer = torch.optim.Adam(learning, lr=2e-3)
    random = torch.Generator().manual_seed(4)
    for step in range(MOST_STEPS):
        tokens, features = texts[step % len(texts)]
        anchor = torch.randint(1, len(tokens) - BLOCK, (), generator=random).item()
        loss = block_loss(draft, target, tokens, features, anchor)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 49 and acceptance(draft, texts, target) >= ENOUGH_ACCEPTED:
            return
    raise RuntimeError(f"less than {ENOUGH_ACCEPTED:.0%} of the draft tokens are right after {MOST_STEPS} steps")


@torch.no_grad()
def read(target: PreTrainedModel, prompt: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """The target's greedy text [T] after a prompt, and its features [1, T, K*H]."""
    ids = torch.tensor([prompt])
    text = target.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW + BLOCK, do_sample=False)
    states = target(text, output_hidden_states=True).hidden_states
    return text[0], torch.cat([states[tap + 1] for tap in TAPS], dim=-1)


def block_logits(draft, target, tokens: torch.Tensor, features: torch.Tensor, anchor: int) -> torch.Tensor:
    """Logits [B-1, V] of the block whose anchor stands at position `anchor`."""
    ids = torch.cat([tokens[anchor : anchor + 1], torch.full((BLOCK - 1,), MASK)])
    embeddings = target.get_input_embeddings()(ids)[None].detach()
    output = draft(noise_embeds=embeddings, context_hidden_states=features[:, :anchor])
    return target.lm_head(output.last_hidden_state[0, 1:])


def block_loss(draft, target, tokens, features, anchor: int) -> torch.Tensor:
    logits = block_logits(draft, target, tokens, features, anchor)
    return functional.cross_entropy(logits, tokens[anchor + 1 : anchor + BLOCK])


@torch.no_grad()
def acceptance(draft, texts, target) -> float:
    """Share of draft tokens that would be accepted, over blocks at a few places of each text."""
    kept, drafted = 0, 0
    for tokens, features in texts:
        for anchor in range(len(tokens) - NEW, len(tokens) - BLOCK, 7):
            right = (
                block_logits(draft, target, tokens, features, anchor).argmax(-1).eq(tokens[anchor + 1 : anchor + BLOCK])
            )
            kept += right.long().cumprod(0).sum().item()
            drafted += BLOCK - 1
    return kept / drafted


def write_drafter(folder: Path, target: PreTrainedModel, prompts: list[list[int]], **settings) -> Path:
    """A trained drafter in a new checkpoint folder."""
    draft = tiny_drafter(**settings)
    train(draft, target, prompts)
    return write_checkpoint(draft, folder)


def _other_taps(config: dict, weights: dict) -> None:
    config["dflash_config"]["target_layer_ids"] = [tap - 1 for tap in TAPS]


def _other_mask(config: dict, weights: dict) -> None:
    config["dflash_config"]["mask_token_id"] = MASK - 1


def _other_rope(config: dict, weights: dict) -> None:
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 100.0


def _causal(config: dict, weights: dict) -> None:
    config["is_causal"] = True


def _swapped_k_norms(config: dict, weights: dict) -> None:
    names = [f"layers.{layer}.self_attn.k_norm.weight" for layer in (0, 1)]
    weights[names[0]], weights[names[1]] = weights[names[1]], weights[names[0]]


DAMAGES: dict[str, Callable[[dict, dict], None]] = {
    "taps lower by one": _other_taps,
    "another mask token": _other_mask,
    "another RoPE theta": _other_rope,
    "causal blocks": _causal,
    "K-norms of two layers swapped": _swapped_k_norms,
}


def write_damaged(source: Path, folder: Path, damage: str) -> Path:
    """Copies a checkpoint with one thing wrong in it that keeps it loadable."""
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    weights = load_file(folder / "model.safetensors")
    DAMAGES[damage](config, weights)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
