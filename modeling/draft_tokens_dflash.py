"""Tokens that a drafter proposes, where these are not all: how a config writes them, and the target's head for them.

Most of a text is written in few tokens, and a drafter that proposes only these needs only their rows of the head
(FR-Spec, arXiv 2502.14856). The target verifies over its whole vocabulary, so its output stays what it is.
"""

import re

import torch
from torch import nn
from torch.nn import functional

from .devices_dflash import weights_in_place


def read_token_ids(value, size: int):
    """The ids that a config names as ranges, "0-2,5", in a vocabulary of `size`; what is no string stays as it is.

    Raises:
        ValueError: the string is something else, or an id is not in the vocabulary.
    """
    if not isinstance(value, str):
        return value
    ids: list[int] = []
    for part in value.split(","):
        if not re.fullmatch(r"\d{1,18}(-\d{1,18})?", part):
            raise ValueError(f"draft_token_ids must be ids and ranges such as 0-2,5; {part[:40]!r} is neither")
        first, last = int(part.split("-")[0]), int(part.split("-")[-1])
        if last >= size:
            raise ValueError(f"draft_token_ids has {part}, but vocab_size is {size}")
        ids += range(first, last + 1)
    return ids


def write_token_ids(ids: list[int]) -> str:
    """Ascending ids as ranges: [0, 1, 2, 5] -> "0-2,5"."""
    starts = [i for i, token in enumerate(ids) if i == 0 or ids[i - 1] != token - 1]
    ranges = [(ids[begin], ids[end - 1]) for begin, end in zip(starts, [*starts[1:], len(ids)], strict=True)]
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in ranges)


def check_token_ids(ids, size: int) -> None:
    """Raises `ValueError` for what is no list of ascending ids of a vocabulary of `size`."""
    plain = isinstance(ids, (list, tuple)) and all(isinstance(x, int) and not isinstance(x, bool) for x in ids)
    if not plain or not ids or list(ids) != sorted(set(ids)):
        raise ValueError("draft_token_ids must be at least one id, strictly increasing, or ranges such as 0-2,5")
    if ids[0] < 0 or ids[-1] >= size:
        raise ValueError(f"draft_token_ids span {ids[0]}..{ids[-1]}, but vocab_size is {size}")


class RestrictedHead:
    """A target's head with the rows of some tokens only: what it costs is proportional to their number.

    Args:
        head (`nn.Linear`): the target's head; see `suits`.
        token_ids ([n] ids): the tokens, ascending. Logit j is that of token `token_ids[j]`.
    """

    def __init__(self, head: nn.Linear, token_ids):
        with weights_in_place(head):
            self.token_ids = torch.as_tensor(token_ids, device=head.weight.device)
            self.weight = head.weight.detach()[self.token_ids]
            self.bias = None if head.bias is None else head.bias.detach()[self.token_ids]

    @staticmethod
    def suits(head: nn.Module) -> bool:
        """Whether rows of a head can be taken out: not of a quantised or adapted one, or one over several devices."""
        return type(head) is nn.Linear and type(head.weight) is nn.Parameter and head.weight.is_floating_point()

    def __call__(self, hidden: torch.Tensor) -> torch.Tensor:
        """Logits [..., n] of hidden states [..., H] of any device and dtype."""
        return functional.linear(hidden.to(self.weight.device, self.weight.dtype), self.weight, self.bias)
