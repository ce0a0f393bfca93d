"""The drafter's side of a decode: its cache of the target's context, and one block per round.

Shapes: N rows, n new context positions, B block size, K taps, H width.
"""

import torch

from .cache_dflash import DFlashDraftCache
from .devices_dflash import execution_device
from .draft_tokens_dflash import RestrictedHead
from .sampling_dflash import DraftProposal, Sampler
from .target_dflash import TargetSession


class BlockDrafter:
    """The drafter with its cache, for one call.

    Args:
        draft (`DFlashDraftModel`): the drafter.
        session (`TargetSession`): the target, whose embedding and head the drafter borrows, unless it has its own.
        block (`int`): positions of a block, B: the anchor and B - 1 masks.
        prompt (`int`): positions of the prompt, for which the cache has room before it grows.
        window (`int`, *optional*): context positions that the drafter attends to at most; see `window_start`.
        confidence (`float`): what `DraftConfidence` cuts proposals at; 0: not at all.
        kept (`DFlashDraftCache`, *optional*): the cache of an earlier call, to continue.
        outlives (`bool`): whether the cache is used after this call, so that no context may be missing from it.
    """

    def __init__(
        self, draft, session: TargetSession, block, prompt, window=None, confidence=0.0, kept=None, outlives=False
    ):
        config = draft.config
        self.confidence = confidence
        self.draft, self.session, self.block, self.window = draft, session, block, window
        self.width = 1 + config.proposals(block)  # positions the target verifies at most: the anchor and all proposals
        windows = [config.cache_window(i) for i in range(config.num_hidden_layers)]
        self.cache = kept or DFlashDraftCache(windows, min(prompt, window or prompt) + max(256, block))
        self.outlives = outlives
        # A norm tells both also where the linear layers are quantised.
        self.device, self.dtype = execution_device(draft.hidden_norm), draft.hidden_norm.weight.dtype
        self.masks = torch.full((1, block - 1), config.mask_token_id, device=session.device)
        self.embedding_scale = config.input_embedding_scale
        self.head = session.head
        if config.draft_token_ids is not None and RestrictedHead.suits(session.head_module):
            self.head = RestrictedHead(session.head_module, config.draft_token_ids)

    def absorb(self, features: torch.Tensor) -> None:
        """Takes features [N, n, K*H] into the cache as context, so that they need not be kept."""
        features = self._slide(features)
        length = self.cache.get_seq_length()
        positions = torch.arange(length, length + features.shape[1], device=self.device)[None]
        self.draft.absorb(features.to(self.device, self.dtype), positions, self.cache)

    def propose(self, state, sampler: Sampler, most: int) -> DraftProposal | None:
        """One forward over the state's new features and a block: anchor and masks -> at most `most` draft tokens.

        None: the drafter is sure of none.
        """
        features = self._slide(state.features)
        rows, fresh = features.shape[:2]
        ids = torch.cat([state.anchor[:, None], self.masks.expand(rows, -1)], dim=1)
        noise = self._embed(ids)
        start = self.cache.start
        offsets = torch.arange(-fresh - start, self.block - start, device=self.session.device)
        output = self.draft(
            noise_embeds=noise.to(self.device, self.dtype),
            context_hidden_states=features.to(self.device, self.dtype),
            position_ids=(state.length[:, None] + offsets).to(self.device),
            cache=self.cache,
        )
        self.cache.keep_context(fresh)
        pick = DraftConfidence(sampler.pick) if self.confidence else sampler.pick
        proposal = self.draft.propose(output.last_hidden_state, state.anchor, self.head, pick)
        count = min(most, pick.leading(self.confidence)) if self.confidence else most
        return proposal.first(count) if count else None

    def _embed(self, ids: torch.Tensor) -> torch.Tensor:
        """Scaled rows [..., H] of the drafter's own embedding, or of the target's."""
        if self.draft.embed_tokens is None:
            return self.session.embed(ids, self.embedding_scale)
        return self.draft.embed_tokens(ids.to(self.device)) * self.embedding_scale

    def skip(self, state) -> None:
        """A round without a draft: takes the state's new features in if a later block or a later call needs them."""
        if self.outlives or (self.block > 1 and state.width > 1):
            self.absorb(state.features)

    def _slide(self, features: torch.Tensor) -> torch.Tensor:
        """Moves the window on, so that it ends with features [N, n, K*H]; gives those within it."""
        held = self.cache.get_seq_length()
        ahead = window_start(self.cache.start + held + features.shape[1], self.window) - self.cache.start
        if ahead <= 0:
            return features
        self.cache.forget_oldest(ahead, self.draft.rotary_emb.turn_back)
        return features[:, max(0, ahead - held) :]


class DraftConfidence:
    """A `pick` that notes how sure the drafter is of each slot: the probability of its most likely token.

    Slots from where the product of these falls below a threshold are not worth verifying. The cut looks at
    distributions only, never at the token drawn from the last of them, so sampling stays lossless.
    """

    def __init__(self, pick):
        self.pick = pick
        self.noted: list[torch.Tensor] = []  # [N, S] of all slots, or [N] of one after the other

    def __call__(self, logits: torch.Tensor):
        self.noted.append(logits.float().softmax(-1).amax(-1))
        return self.pick(logits)

    def leading(self, threshold: float) -> int:
        """Slots, from the first on, up to which some row's product is at least `threshold`."""
        sure = self.noted[0] if self.noted[0].dim() == 2 else torch.stack(self.noted, dim=1)
        return int((sure.cumprod(dim=1) >= threshold).sum(dim=1).max())


def window_start(length: int, window: int | None) -> int:
    """The first of `length` context positions that the drafter attends to: at most `window` of them.

    It moves by half a window at a time. So the cached keys move, and turn to their new positions, rarely instead of in
    every round, and each turns once or twice in its life: rounding does not add up.
    """
    if window is None or length <= window:
        return 0
    step = max(1, window // 2)
    return -(-(length - window) // step) * step
