"""The training loop: batches, steps, states to resume from, and the drafters that come out.

It runs under accelerate: one process, or several by `accelerate launch` (DDP or FSDP2).
"""

import contextlib
import copy
import json
import os
import shutil
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from tqdm import tqdm

from dflash.checkpoint import write_checkpoint
from dflash.loading import say
from dflash.training.anchors import draw_anchors, trainable_documents
from dflash.training.blocks import pack_blocks
from dflash.training.config import TrainConfig
from dflash.training.documents import Document
from dflash.training.losses import LossMix, decay_gamma
from dflash.training.metrics import Meter
from dflash.training.schedule import DocumentStream, accumulation, learning_rate_factor
from dflash.training.state import StateFolder
from dflash.training.step import Objective, TrainableDrafter
from dflash.training.target import TargetParts, TrainedHead

# What may differ between a run and its continuation: none of it changes what is computed.
_FREE = {"cpu", "log_every", "save_every", "keep_states", "report_to", "project", "save_dtype", "micro_batch_size"}
_FREE |= {"eval_every", "eval_prompts", "eval_documents", "eval_limit", "eval_max_new_tokens"}
_FREE |= {"attention", "gradient_checkpointing", "features", "max_bad_steps", "output", "head_chunk"}


@dataclass(frozen=True)
class TrainResult:
    """What a run ended with: steps done, folder of the last drafter (None if it was interrupted), and best real tau."""

    steps: int
    final: Path | None
    best_tau: float | None
    interrupted: bool


class Trainer:
    """One run.

    Args:
        config (`TrainConfig`): its settings.
        draft (`DFlashDraftModel`): the drafter to train, in float32.
        target (`PreTrainedModel`): its target, whose embedding and head are used.
        documents (`list[Document]`): what to train on; those without a place for a block are left out.
        source (`Callable`): maps a list of documents to the target's states of each, `list[TargetStates]`.
        evaluate (`Callable`, *optional*): maps a drafter in evaluation mode to figures, of which `tau` chooses the best
            drafter.
        accelerator (`Accelerator`, *optional*): default: one by `make_accelerator`.
    """

    def __init__(
        self,
        config: TrainConfig,
        draft,
        target,
        documents: list[Document],
        source: Callable,
        evaluate: Callable | None = None,
        accelerator: Accelerator | None = None,
    ):
        self.config, self.source, self.evaluate = config, source, evaluate
        self.output = Path(config.output)
        documents = trainable_documents([shorten(document, longest(config, draft)) for document in documents])
        self.accelerator = accelerator or make_accelerator(config)
        self.micro_steps = accumulation(config.batch_size, config.micro_batch_size, self.accelerator.num_processes)
        self.stream = DocumentStream(documents, config.batch_size, config.seed)
        self.steps = config.max_steps or self.stream.steps(config.epochs)
        self.states = StateFolder(self.output / "states", config.keep_states)
        self.step = self.bad_steps = self.skipped = 0
        self.best_tau: float | None = None
        self.draft_config = draft.config
        parts = TargetParts(target)
        objective = make_objective(config, draft.config.block_size)
        if objective.mix.needs_target:
            parts.check_logits(documents[0].input_ids[:32])
        if config.gradient_checkpointing:
            draft.gradient_checkpointing_enable()
        draft.config.draft_token_ids = trained_tokens(config, draft, documents)
        head = None
        if draft.config.draft_token_ids is not None:
            head = TrainedHead(parts.head, draft.config.draft_token_ids)
        flex = config.attention == "flex" or (config.attention == "auto" and self.accelerator.device.type == "cuda")
        model = TrainableDrafter(draft.train(), parts, objective, flex, head)
        self.model, self.optimizer = self.accelerator.prepare(model, make_optimizer(model, config))
        self.stop_signal: int | None = None

    @property
    def main(self) -> bool:
        return self.accelerator.is_main_process

    def run(self, resume: bool = False) -> TrainResult:
        """Trains to the end, or to a signal; then writes the final drafter.

        Raises:
            FileExistsError: the output folder holds a run already, and `resume` is not set.
            FloatingPointError: too many steps in a row were not finite.
        """
        self._begin(resume)
        meter = Meter(self.draft_config.proposals())
        disable = None if self.main else True  # None: where the output is no terminal
        with self._signals(), tqdm(total=self.steps, initial=self.step, unit="step", disable=disable) as bar:
            while self.step < self.steps and not self._stopping():
                self._one_step(meter)
                self.step += 1
                bar.update()
                if self.step % self.config.log_every == 0 or self.step == self.steps:
                    self._log(meter.flush())
                if self.config.eval_every and self.step % self.config.eval_every == 0 and self.step < self.steps:
                    self._evaluate()
                if self.step % self.config.save_every == 0:
                    self._save()
        interrupted = self.step < self.steps
        if not interrupted and self.evaluate is not None:
            self._evaluate()
        self._save()
        final = None if interrupted else self._write_drafter("final")
        self.accelerator.end_training()
        return TrainResult(self.step, final, self.best_tau, interrupted)

    def _one_step(self, meter: Meter) -> None:
        """Gradient of the weighted mean loss over the whole batch; then AdamW, unless something is not finite."""
        rate = self.config.learning_rate * learning_rate_factor(self.step, self.steps, self.config)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        torch.manual_seed((self.config.seed * 1_000_003 + self.step) * 10_007 + self.accelerator.process_index)
        sums = meter.sums(self.accelerator.device)
        for micro, batch in enumerate(self._batches()):
            last = micro == self.micro_steps - 1
            with contextlib.nullcontext() if last else self.accelerator.no_sync(self.model):
                output = self.model(batch)
                self.accelerator.backward(output["loss"])
            sums.add(output, batch)
        totals = sums.reduced(self.accelerator)
        norm = self._scale_gradients(totals["weight"])
        if self._is_finite(totals, norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        meter.update(totals, norm, rate)

    def _batches(self):
        """This process's packed batches of the step."""
        size, processes, index = (
            self.config.micro_batch_size,
            self.accelerator.num_processes,
            self.accelerator.process_index,
        )
        chosen = self.stream.batch(self.step)
        for micro in range(self.micro_steps):
            begin = (micro * processes + index) * size
            part = chosen[begin : begin + size]
            anchors = [
                draw_anchors(document, epoch, self.config.seed, self.config.max_anchors, self.config.anchor_share)
                for epoch, document in part
            ]
            documents = [document for _, document in part]
            yield pack_blocks(documents, anchors, self.source(documents), self.draft_config)

    def _scale_gradients(self, weight: float) -> float:
        """Turns the gradient of a sum, averaged over processes, into that of the mean, clipped; gives its norm."""
        parameters = [parameter for parameter in self.model.parameters() if parameter.grad is not None]
        scale = self.accelerator.num_processes / weight if weight else 0.0
        torch._foreach_mul_([parameter.grad for parameter in parameters], scale)
        norm = torch.nn.utils.clip_grad_norm_(parameters, self.config.max_grad_norm)
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    def _is_finite(self, totals: dict, norm: float) -> bool:
        """Counts steps that are not finite, and raises when there were too many in a row."""
        if all(torch.isfinite(torch.tensor([totals["loss"], totals["weight"], norm]))):
            self.bad_steps = 0
            return True
        self.bad_steps, self.skipped = self.bad_steps + 1, self.skipped + 1
        if self.main:
            say(f"step {self.step}: loss {totals['loss']}, gradient norm {norm}; the step is skipped")
        if self.bad_steps >= self.config.max_bad_steps:
            raise FloatingPointError(
                f"{self.bad_steps} steps in a row were not finite, up to step {self.step}; the last state is "
                f"{self.states.newest()}. Are features and learning_rate {self.config.learning_rate} sound?"
            )
        return False

    def _begin(self, resume: bool) -> None:
        newest = self.states.newest()
        if newest is not None and not resume:
            raise FileExistsError(f"{self.output} holds a run already; pass --resume to continue it, or another output")
        if (self.output / "final").exists() and newest is None:
            raise FileExistsError(f"{self.output}/final exists already; choose another output")
        if newest is not None:
            progress = self.states.load(newest, self.model, self.optimizer.optimizer)
            self._check_same(progress["config"])
            self.step, self.skipped, self.best_tau = progress["step"], progress["skipped"], progress["best_tau"]
        if self.main:
            self.output.mkdir(parents=True, exist_ok=True)
            self.config.write(self.output / "train.yaml")
            _cut_metrics(self.output / "metrics.jsonl", self.step)
        if self.config.report_to:
            self.accelerator.init_trackers(self.config.project, config=_flat(self.config.to_dict()))

    def _check_same(self, stored: dict) -> None:
        now = self.config.to_dict()
        changed = [key for key, value in stored.items() if key not in _FREE and now.get(key) != value]
        if changed:
            pairs = ", ".join(f"{key} was {stored[key]!r} and is {now.get(key)!r}" for key in changed)
            raise ValueError(f"the run in {self.output} cannot be continued with other settings: {pairs}")

    def _save(self) -> None:
        progress = {"skipped": self.skipped, "best_tau": self.best_tau, "config": self.config.to_dict()}
        self.states.save(self.step, self.model, self.optimizer.optimizer, progress, self.main)
        self.accelerator.wait_for_everyone()

    def _log(self, metrics: dict) -> None:
        self._report({"step": self.step, "skipped": self.skipped, **metrics})

    def _report(self, line: dict) -> None:
        if not self.main:
            return
        with (self.output / "metrics.jsonl").open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        words = (f"{key} {_short(value)}" for key, value in line.items() if not isinstance(value, list))
        tqdm.write(" ".join(words), file=sys.stderr)
        if self.config.report_to:
            self.accelerator.log(_flat({key: value for key, value in line.items() if key != "step"}), step=self.step)

    def _evaluate(self) -> None:
        """Decodes held-out prompts on the main process, and keeps the drafter if it is the best so far."""
        whole = self.whole_drafter()
        if self.main:
            was_training = whole.training
            figures = self.evaluate(whole.eval())
            whole.train(was_training)
            self._report({"step": self.step, **{f"eval_{key}": value for key, value in figures.items()}})
            if self.best_tau is None or figures["tau"] > self.best_tau:
                self.best_tau = figures["tau"]
                self._replace_drafter("best", whole)
        self.accelerator.wait_for_everyone()

    def whole_drafter(self):
        """The drafter with all its weights, on the main process; None on others where weights are sharded."""
        plain = self.accelerator.unwrap_model(self.model).draft
        if not any(hasattr(parameter, "full_tensor") for parameter in plain.parameters()):
            return plain
        weights = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if not self.main:
            return None
        whole = type(plain)(copy.deepcopy(self.draft_config))
        whole.load_state_dict({name.removeprefix("draft."): tensor for name, tensor in weights.items()})
        return whole.to(self.accelerator.device)

    def _write_drafter(self, name: str) -> Path:
        whole = self.whole_drafter()
        if self.main:
            self._replace_drafter(name, whole)
        self.accelerator.wait_for_everyone()
        return self.output / name

    def _replace_drafter(self, name: str, whole) -> None:
        """Writes a checkpoint of the drafter, with the settings that made it, as `name`; one that was there goes."""
        exported = type(whole)(copy.deepcopy(self.draft_config))
        exported.load_state_dict(whole.state_dict())
        exported.to(getattr(torch, self.config.save_dtype))
        place, staged, old = (self.output / stem for stem in (name, f".{name}.new", f".{name}.old"))
        if old.exists() and not place.exists():  # killed between the two moves below
            os.rename(old, place)
        for path in (staged, old):
            shutil.rmtree(path, ignore_errors=True)
        write_checkpoint(exported, staged)
        self.config.write(staged / "train.yaml")
        if place.exists():
            os.rename(place, old)
        os.rename(staged, place)
        shutil.rmtree(old, ignore_errors=True)

    def _stopping(self) -> bool:
        """Whether any process was told to stop."""
        told = torch.tensor(float(self.stop_signal is not None), device=self.accelerator.device)
        return bool(self.accelerator.reduce(told, reduction="sum"))

    @contextlib.contextmanager
    def _signals(self):
        """Within this context SIGTERM and SIGINT end the run after its current step, with a state to resume from.

        Python lets only the main thread set that up; in another, signals do what they did.
        """

        def note(number, frame):
            if self.stop_signal is not None and number == signal.SIGINT:
                raise KeyboardInterrupt
            self.stop_signal = number

        handled = (signal.SIGTERM, signal.SIGINT) if threading.current_thread() is threading.main_thread() else ()
        before = {number: signal.signal(number, note) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def make_accelerator(config: TrainConfig) -> Accelerator:
    patient = InitProcessGroupKwargs(timeout=timedelta(hours=4))  # others wait while the main process decodes
    return Accelerator(
        cpu=config.cpu,
        mixed_precision=config.mixed_precision,
        log_with=list(config.report_to) or None,
        project_dir=config.output,
        kwargs_handlers=[patient],
    )


def make_objective(config: TrainConfig, block_size: int) -> Objective:
    if config.position_weights == "decay":
        decay_gamma(block_size, config.decay_gamma)
    mix = LossMix(config.ce_weight, config.kl_weight, config.tv_weight)
    return Objective(mix, config.position_weights, config.dpace_alpha, config.decay_gamma, config.head_chunk)


def make_optimizer(model, config: TrainConfig) -> torch.optim.AdamW:
    """AdamW whose decay spares norms and other vectors."""
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": config.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=config.learning_rate, betas=config.betas, fused=True)


def longest(config: TrainConfig, draft) -> int:
    """Tokens of a document that are used; raises `ValueError` if the drafter has no such positions."""
    limit = draft.config.max_position_embeddings
    if config.max_length is not None and config.max_length > limit:
        raise ValueError(f"max_length {config.max_length} exceeds the drafter's max_position_embeddings, {limit}")
    return config.max_length or limit


def shorten(document: Document, length: int) -> Document:
    """The first `length` tokens of a document."""
    if len(document.input_ids) <= length:
        return document
    return Document(document.id, document.input_ids[:length], document.loss_mask[:length])


def trained_tokens(config: TrainConfig, draft, documents: list[Document]) -> list[int] | None:
    """The tokens whose logits are trained: those that the documents train, and those of an earlier run; None: all."""
    if config.head_tokens == "all":
        return None
    found = torch.cat([document.input_ids[document.loss_mask.bool()] for document in documents]).unique().tolist()
    return sorted({*found, *(draft.config.draft_token_ids or ())})


def _cut_metrics(path: Path, step: int) -> None:
    """Drops the lines after `step`, which the run is about to write again, and a line that was cut off."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8").splitlines():
        with contextlib.suppress(ValueError):
            if json.loads(line)["step"] <= step:
                kept.append(line + "\n")
    staged = path.with_name(f".{path.name}.new")
    staged.write_text("".join(kept), encoding="utf-8")
    os.replace(staged, path)


def _flat(values: dict) -> dict:
    """Lists as one entry per item, and None as a word: what trackers take."""
    flat = {}
    for key, value in values.items():
        if isinstance(value, list):
            flat.update({f"{key}/{place}": item for place, item in enumerate(value)})
        else:
            flat[key] = "none" if value is None else value
    return flat


def _short(value) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
