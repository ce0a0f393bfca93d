"""DFlash 2: in-block convolutions of a drafter layer, and the selector that turns block outputs into tokens."""

import torch
from torch import nn

from .sampling_dflash import DraftProposal


class DFlashBlockConv(nn.Module):
    """Causal convolution over the positions of a block whose kernel depends on the input (DFlash 2, z-lab).

    A kernel is a learned base per channel plus a correction per group of channels that is projected from the
    sublayer's input. Side 0 acts on the input of a sublayer, side 1 on its output. Shapes: `x` [N, B, H].
    """

    def __init__(self, config):
        super().__init__()
        self.taps = config.conv_kernel_size
        self.groups = config.hidden_size // config.conv_group_size
        self.base_kernel = nn.Parameter(torch.empty(2, self.taps, config.hidden_size))
        self.kernel_projection = nn.Linear(config.hidden_size, 2 * self.taps * self.groups, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """The kernels of both sides for each position: [2, taps, N, B, H]."""
        delta = self.kernel_projection(x).unflatten(-1, (2, self.taps, self.groups)).permute(2, 3, 0, 1, 4)
        return self.base_kernel[:, :, None, None] + delta.repeat_interleave(x.shape[-1] // self.groups, dim=-1)

    @staticmethod
    def convolve(x: torch.Tensor, kernel: torch.Tensor) -> torch.Tensor:
        """Weighted sum of each position and those before it in the block; kernel [taps, N, B, H]."""
        output = kernel[0] * x
        for offset in range(1, min(len(kernel), x.shape[1])):
            output[:, offset:] += kernel[offset, :, offset:] * x[:, :-offset]
        return output


class DFlashCandidateSelector(nn.Module):
    """Walks the block left to right over the top candidates of each position (DFlash 2, z-lab).

    The score of candidate b after token a at position t is its logit plus `<A[a] * (W h_t), B[b]>`.
    """

    def __init__(self, config):
        super().__init__()
        self.top_k = config.selector_top_k
        self.predecessor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.successor_codebook = nn.Parameter(torch.empty(config.vocab_size, config.selector_rank))
        self.hidden_projection = nn.Linear(config.hidden_size, config.selector_rank, bias=False)

    def forward(self, hidden: torch.Tensor, logits: torch.Tensor, anchor: torch.Tensor, pick) -> DraftProposal:
        """hidden [N, S, H] and logits [N, S, V] of the S slots that predict, after `anchor` [N] -> one token per slot.

        The logits may be on another device than this module; tokens and probabilities are on theirs.
        """
        unary, candidates = logits.topk(self.top_k, dim=-1)
        hidden = self.hidden_projection(hidden)
        tokens, probabilities = [], []
        previous, device = anchor, hidden.device
        for slot in range(hidden.shape[1]):
            left = self.predecessor_codebook[previous.to(device)] * hidden[:, slot]
            bonus = (self.successor_codebook[candidates[:, slot].to(device)] @ left[..., None])[..., 0]
            scores = unary[:, slot] + bonus.to(unary.device)
            chosen, probability = pick(scores)
            previous = candidates[:, slot].gather(-1, chosen[:, None])[:, 0]
            tokens.append(previous)
            if probability is not None:
                everywhere = probability.new_zeros(logits.shape[0], logits.shape[-1])
                probabilities.append(everywhere.scatter_(-1, candidates[:, slot], probability))
        return DraftProposal(torch.stack(tokens, 1), torch.stack(probabilities, 1) if probabilities else None)
