"""Figures of a run, from sums that processes and steps add up."""

import sys
import time

import torch

try:
    import resource
except ImportError:  # Windows
    resource = None

SCALARS = ("loss", "weight", "cross_entropy", "rows", "emitted", "blocks")
COUNTS = ("tokens", "covered", "supervised")


class StepSums:
    """What one process adds up over the batches of a step.

    Args:
        slots: predicted positions per block, S.
        device: where the sums are.
    """

    def __init__(self, slots: int, device):
        self.slots = slots
        self.values = torch.zeros(len(SCALARS) + 2 * slots, dtype=torch.float64, device=device)
        self.counts = dict.fromkeys(COUNTS, 0)

    def add(self, output: dict, batch) -> None:
        scalars = torch.stack([output[name].detach().double() for name in SCALARS])
        self.values += torch.cat([scalars, output["correct"].double(), output["counts"].double()])
        self.counts["tokens"] += batch.features.shape[1]
        self.counts["covered"] += batch.covered
        self.counts["supervised"] += batch.supervised

    def reduced(self, accelerator) -> dict:
        """The sums over all processes, as numbers; `correct` and `counts` as lists."""
        counts = torch.tensor(list(self.counts.values()), dtype=torch.float64, device=self.values.device)
        values = accelerator.reduce(torch.cat([self.values, counts]), reduction="sum").tolist()
        scalars, rest = values[: len(SCALARS)], values[len(SCALARS) :]
        slots = {"correct": rest[: self.slots], "counts": rest[self.slots : 2 * self.slots]}
        return {
            **dict(zip(SCALARS, scalars, strict=True)),
            **slots,
            **dict(zip(COUNTS, rest[2 * self.slots :], strict=True)),
        }


class Meter:
    """Adds up steps until they are reported.

    Args:
        slots: predicted positions per block, S.
    """

    def __init__(self, slots: int):
        self.slots = slots
        self.total_tokens = 0.0
        self._clear()

    def sums(self, device) -> StepSums:
        return StepSums(self.slots, device)

    def update(self, totals: dict, norm: float, rate: float) -> None:
        self._totals.append(totals)
        self._norm, self._rate = norm, rate

    def flush(self) -> dict:
        """The figures since the last call.

        `loss` is the weighted mean, `cross_entropy` the plain one; `slot_accuracy` a list; `simulated_tau` 1 + the mean
        accepted run of complete blocks; `coverage` the share of supervised tokens that some block predicts;
        `tokens_per_second` counts context tokens.
        """
        total = {name: sum(step[name] for step in self._totals) for name in (*SCALARS, *COUNTS)}
        slots = [
            [sum(values) for values in zip(*(step[name] for step in self._totals), strict=True)]
            for name in ("correct", "counts")
        ]
        seconds = time.perf_counter() - self._start
        figures = {
            "loss": _ratio(total["loss"], total["weight"]),
            "cross_entropy": _ratio(total["cross_entropy"], total["rows"]),
            "slot_accuracy": [_ratio(right, count) for right, count in zip(*slots, strict=True)],
            "simulated_tau": _ratio(total["emitted"], total["blocks"]),
            "coverage": _ratio(total["covered"], total["supervised"]),
            "grad_norm": self._norm,
            "learning_rate": self._rate,
            "tokens_per_second": total["tokens"] / seconds,
            "memory_gb": peak_memory() / 1e9,
        }
        self._clear()
        return figures

    def _clear(self) -> None:
        self._totals: list[dict] = []
        self._start = time.perf_counter()
        self._norm = self._rate = None


def peak_memory() -> int:
    """Bytes that this process had at most: on its GPU, or else in main memory; 0 where the system does not tell."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    if resource is None:
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def _ratio(above: float, below: float) -> float | None:
    return above / below if below else None
