"""Which documents a step sees and how fast it learns: functions of the step, so that resuming needs nothing else."""

import math
from functools import lru_cache

from dflash.training.anchors import document_order
from dflash.training.documents import Document


class DocumentStream:
    """Epoch after epoch of documents without a break, cut into batches of equal size.

    Args:
        documents: all of them.
        batch_size: documents of a step.
        seed: of the order, which differs in each epoch.
    """

    def __init__(self, documents: list[Document], batch_size: int, seed: int):
        self.documents, self.batch_size, self.seed = documents, batch_size, seed
        self._order = lru_cache(maxsize=2)(lambda epoch: document_order(len(documents), epoch, seed))

    def steps(self, epochs: float) -> int:
        """Batches in so many epochs, at least one."""
        return max(1, round(epochs * len(self.documents) / self.batch_size))

    def batch(self, step: int) -> list[tuple[int, Document]]:
        """(epoch, document) of each document of a step."""
        begin = step * self.batch_size
        places = (divmod(place, len(self.documents)) for place in range(begin, begin + self.batch_size))
        return [(epoch, self.documents[self._order(epoch)[index]]) for epoch, index in places]


def accumulation(batch_size: int, micro_batch_size: int, processes: int) -> int:
    """Forwards of each process in a step.

    Raises:
        ValueError: the sizes do not divide the batch.
    """
    at_once = micro_batch_size * processes
    if batch_size % at_once:
        raise ValueError(
            f"batch_size {batch_size} is not a multiple of micro_batch_size {micro_batch_size} times {processes} "
            f"process(es), {at_once}"
        )
    return batch_size // at_once


def learning_rate_factor(step: int, steps: int, config) -> float:
    """The learning rate of a step (counted from 0) of `steps`, as a share of its peak.

    It rises over `warmup_share` of the steps. Then cosine falls to `min_lr_share`; wsd stays at the peak and falls
    linearly over the last `decay_share` (warm-up, stable, decay); constant stays.
    """
    warmup = round(config.warmup_share * steps)
    if step < warmup:
        return (step + 1) / warmup
    low = config.min_lr_share
    if config.schedule == "cosine":
        progress = (step - warmup) / max(1, steps - 1 - warmup)
        return low + (1 - low) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
    if config.schedule == "wsd":
        decay = max(1, round(config.decay_share * steps))
        return low + (1 - low) * min(1.0, max(0, steps - 1 - step) / decay)
    return 1.0
