"""One training run: steps until the time is up, in as many processes as are started for it.

It checkpoints into the cache and goes on from there when it is started again. SIGTERM ends it
after the step under way, with a checkpoint.
"""

import argparse
import itertools
import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaForCausalLM

from models.train import checkpoint, parallel
from models.train.batches import IGNORED, MICRO_TOKENS, MicroBatch, Row, micro_batches
from models.train.optimizer import optimizers, set_rate

SAVE_EVERY_S = 150
LOG_EVERY = 20
FREE = ("minutes", "rank", "device", "workers")
"""Options that may change when a run is continued: the plateau can be left at any time, each
process has its own checkpoint, and device and workers do not affect which rows are drawn."""
GPU_MICRO_TOKENS = 65_536
DRAWN_AHEAD = 2
"""Steps that each worker draws ahead."""

Draw = Callable[[random.Random, int], list[Row]]


class StepBatches(NamedTuple):
    """What one process learns in a step: its tokens, those with a label, and the batches."""

    tokens: int
    learnt: int
    batches: list[MicroBatch]


class Steps(Dataset[StepBatches]):
    """The batches of every step, by its number: `draw` gives the rows."""

    def __init__(self, draw: Draw, label: str, pad: int, most: int) -> None:
        self.draw, self.label, self.pad, self.most = draw, label, pad, most

    def __getitem__(self, step: int) -> StepBatches:
        rows = self.draw(random.Random(self.label.format(step)), step)
        label_count = sum(label != IGNORED for row in rows for label in row.labels)
        batches = list(micro_batches(rows, self.pad, self.most))
        return StepBatches(sum(len(row.ids) for row in rows), label_count, batches)


class TrainingRun:
    """The weights, their average, the optimizers, and the time already spent.

    `draw` gives a step's rows for one process from a seeded generator and the step's number, in
    `options.workers` processes ahead of the step or, with 0, in this one; `losses` the loss at
    every learnt position of a batch, row by row; `export` takes the averaged weights after every
    checkpoint. `keep` is the average's memory, `rate_scale` scales all rates, `muon` as in
    `optimizers`.
    Raises checkpoint.OtherRun if the last checkpoint is of other `options`.
    """

    def __init__(
        self,
        name: str,
        model: LlamaForCausalLM,
        draw: Draw,
        losses: Callable[[MicroBatch], Tensor],
        export: Callable[[LlamaForCausalLM], None],
        options: argparse.Namespace,
        rate_scale: float = 1.0,
        keep: float = 0.995,
        *,
        muon: bool = True,
    ) -> None:
        self.name, self.losses, self.export = name, losses, export
        self.device, self.workers = torch.device(options.device), options.workers
        self.model = model
        nn.Module.to(model, self.device)
        assert isinstance(model.config.pad_token_id, int)
        most = GPU_MICRO_TOKENS if self.device.type == "cuda" else MICRO_TOKENS
        self.steps = Steps(draw, f"{name} {{}} {options.rank}", model.config.pad_token_id, most)
        self.rank, self.world, self.budget_s = options.rank, options.world, options.minutes * 60
        self.options = {n: value for n, value in vars(options).items() if n not in FREE}
        state = checkpoint.load(f"{name}.{self.rank}", self.options)
        torch.set_num_threads(1)
        parallel.join(name, self.rank, self.world)
        self.optimizers = optimizers(model, rate_scale, self.rank, self.world, muon=muon)
        self.average = checkpoint.Average(model, keep)
        self.step, self.tokens, self.spent_s = 0, 0, 0.0
        self.stopping = self.stopped = False
        self.clock = 0.0
        """Seconds spent, as all processes last agreed on it."""
        self.sums: dict[str, list[Tensor]] = defaultdict(list)
        """By kind of row: sums and counts of losses."""
        if state is not None:
            self._restore(state)

    def train(self) -> None:
        """Step until the budget is spent or SIGTERM comes; log and save along the way."""
        self.train_until(self.budget_s)
        self.save()
        parallel.leave(self.name, self.world)

    def train_until(self, seconds: float) -> None:
        """Step until `seconds` of the budget are spent or SIGTERM comes, from rows drawn anew."""
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        last_save, batches = self.clock, self.drawn()
        while self.clock < min(seconds, self.budget_s) and not self.stopped:
            self.take_step(batches)
            if self.step % LOG_EVERY == 0:
                self._log()
            if self.clock - last_save > SAVE_EVERY_S:
                self.save()
                last_save = self.clock

    def spend(self, seconds: float) -> None:
        """Count work between steps as time of this run; no other process may share the run."""
        self.spent_s += seconds
        self.clock += seconds

    def drawn(self) -> Iterator[StepBatches]:
        """The batches of the steps from the current one on."""
        loader = DataLoader(
            self.steps,
            batch_size=None,
            sampler=itertools.count(self.step),
            num_workers=self.workers,
            collate_fn=_as_they_are,
            worker_init_fn=_ends_by_sigterm,
            prefetch_factor=DRAWN_AHEAD if self.workers else None,
        )
        return iter(loader)

    def take_step(self, batches: Iterator[StepBatches]) -> None:
        """One optimizer step, together with the other processes."""
        start = time.monotonic()
        rows = next(batches)
        for batch in rows.batches:
            losses = self.losses(batch.to(self.device))
            (losses.sum() / rows.learnt).backward()
            self._count(batch, losses.detach())
        local = [rows.tokens, self.spent_s, self.stopping]
        total, spent, stopping = parallel.sum_gradients(self.model, local, self.world)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        set_rate(self.optimizers, spent / self.world / self.budget_s)
        for optimizer in self.optimizers:
            optimizer.step()
        self.model.zero_grad()
        parallel.share_matrices(self.model, self.world)
        self.average.update(self.model)
        self.step += 1
        self.tokens += round(total)
        self.spent_s = spent / self.world + time.monotonic() - start
        self.clock = spent / self.world
        self.stopped = stopping > 0

    def stop(self) -> None:
        """Ask all processes to end after the step that tells them."""
        self.stopping = True

    def save(self) -> None:
        """Checkpoint, and export the averaged weights."""
        checkpoint.save(
            f"{self.name}.{self.rank}",
            self.options,
            {
                "model": self.model.state_dict(),
                "average": self.average.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
                "step": self.step,
                "tokens": self.tokens,
                "spent_s": self.spent_s,
            },
        )
        if self.rank == 0:
            self.export(self.average.model)

    def _restore(self, state: dict) -> None:
        self.model.load_state_dict(state["model"])
        self.average.model.load_state_dict(state["average"])
        for optimizer, optimizer_state in zip(self.optimizers, state["optimizers"], strict=True):
            peaks = [group["peak"] for group in optimizer.param_groups]
            optimizer.load_state_dict(optimizer_state)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak"] = peak
        self.step, self.tokens, self.spent_s = state["step"], state["tokens"], state["spent_s"]
        self.average.steps = self.step
        self.clock = self.spent_s

    def _count(self, batch: MicroBatch, losses: Tensor) -> None:
        kinds = sorted(set(batch.kinds))
        numbers = torch.tensor([kinds.index(kind) for kind in batch.kinds])
        index = numbers.repeat_interleave((batch.labels != IGNORED).sum(1))
        counts = index.bincount(minlength=len(kinds)).tolist()
        totals = losses.new_zeros(len(kinds)).index_add_(0, index.to(losses.device), losses)
        for kind, total, count in zip(kinds, totals, counts, strict=True):
            self.sums[kind].append(torch.stack([total, total.new_tensor(count)]))

    def _log(self) -> None:
        sums = {kind: torch.stack(parts).sum(0).tolist() for kind, parts in self.sums.items()}
        losses = {kind: round(total / count, 4) for kind, (total, count) in sums.items()}
        rate = round(self.tokens / self.spent_s)
        line = {"run": self.name, "step": self.step, "s": round(self.spent_s)}
        line |= {"tokens": self.tokens, "rate": rate}
        print(json.dumps(line | losses), flush=True)
        self.sums.clear()


def _as_they_are(batches: Any) -> Any:
    return batches


def _ends_by_sigterm(_: int) -> None:
    """Let SIGTERM end a worker at once: it has no step to finish."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


def arguments(description: str | None, minutes: float) -> argparse.ArgumentParser:
    """The options of every training command; `minutes`: the default of `--minutes`."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--rank", type=int, default=0, help="which of the processes this is")
    parser.add_argument("--world", type=int, default=1, help="how many there are, one a core")
    parser.add_argument("--device", default="cpu", help="where to learn: cpu or cuda")
    parser.add_argument("--workers", type=int, default=0, help="processes that draw rows ahead")
    return parser
