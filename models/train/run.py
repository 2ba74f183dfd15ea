"""One training run: steps until the time is up, in as many processes as are started for it.

It checkpoints into the cache and goes on from there when it is started again. SIGTERM ends it
after the step under way, with a checkpoint.
"""

import argparse
import json
import random
import signal
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from models.train import checkpoint, parallel
from models.train.batches import IGNORED, MicroBatch, Row, micro_batches
from models.train.optimizer import optimizers, set_rate

SAVE_EVERY_S = 150
LOG_EVERY = 20
FREE = ("minutes", "rank")
"""Options that a run may be continued with otherwise: the plateau can be left at any time, and each
process has a checkpoint of its own."""


class TrainingRun:
    """The weights, their average, the optimizers, and the time already spent.

    `draw` gives a step's rows for one process from a seeded generator and the step's number;
    `losses` the loss at every learnt position of a batch, row by row; `export` takes the averaged
    weights after every checkpoint. `keep` is the average's memory, `rate_scale` scales all rates.
    Raises checkpoint.OtherRun where the last checkpoint is of other `options`.
    """

    def __init__(
        self,
        name: str,
        model: LlamaForCausalLM,
        draw: Callable[[random.Random, int], list[Row]],
        losses: Callable[[MicroBatch], Tensor],
        export: Callable[[LlamaForCausalLM], None],
        options: argparse.Namespace,
        rate_scale: float = 1.0,
        keep: float = 0.995,
    ) -> None:
        self.name, self.model, self.draw, self.losses, self.export = (
            name, model, draw, losses, export,
        )  # fmt: skip
        assert isinstance(model.config.pad_token_id, int)
        self.pad = model.config.pad_token_id
        self.rank, self.world, self.budget_s = options.rank, options.world, options.minutes * 60
        self.options = {n: value for n, value in vars(options).items() if n not in FREE}
        state = checkpoint.load(f"{name}.{self.rank}", self.options)
        torch.set_num_threads(1)
        parallel.join(name, self.rank, self.world)
        self.built = optimizers(model, rate_scale, self.rank, self.world)
        self.average = checkpoint.Average(model, keep)
        self.step, self.tokens, self.spent_s = 0, 0, 0.0
        self.stopping = self.stopped = False
        self.clock = 0.0
        """The time spent as all processes last agreed on it."""
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0])
        if state is not None:
            self._restore(state)

    def train(self) -> None:
        """Step until the budget is spent or SIGTERM comes; log and save along the way."""
        signal.signal(signal.SIGTERM, lambda *_: self.stop())
        saved = self.clock
        while self.clock < self.budget_s and not self.stopped:
            self.take_step()
            if self.step % LOG_EVERY == 0:
                self._log()
            if self.clock - saved > SAVE_EVERY_S:
                self.save()
                saved = self.clock
        self.save()
        parallel.leave(self.name)

    def take_step(self) -> None:
        """One optimizer step, together with the other processes."""
        started = time.monotonic()
        rows = self.draw(random.Random(f"{self.name} {self.step} {self.rank}"), self.step)
        learnt = sum(label != IGNORED for row in rows for label in row.labels)
        for batch in micro_batches(rows, self.pad):
            losses = self.losses(batch)
            (losses.sum() / learnt).backward()
            self._count(batch, losses.detach())
        tokens = sum(len(row.ids) for row in rows)
        local = [tokens, self.spent_s, self.stopping]
        total, spent, stopping = parallel.sum_gradients(self.model, local)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        set_rate(self.built, spent / self.world / self.budget_s)
        for optimizer in self.built:
            optimizer.step()
        self.model.zero_grad()
        parallel.share_matrices(self.model, self.world)
        self.average.update(self.model)
        self.step += 1
        self.tokens += round(total)
        self.spent_s = spent / self.world + time.monotonic() - started
        self.clock = spent / self.world
        self.stopped = stopping > 0

    def stop(self) -> None:
        """Ask all processes to end after the step in which they hear of it."""
        self.stopping = True

    def save(self) -> None:
        """Checkpoint, and export the averaged weights."""
        checkpoint.save(
            f"{self.name}.{self.rank}",
            self.options,
            {
                "model": self.model.state_dict(),
                "average": self.average.model.state_dict(),
                "optimizers": [optimizer.state_dict() for optimizer in self.built],
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
        for optimizer, saved in zip(self.built, state["optimizers"], strict=True):
            peaks = [group["peak"] for group in optimizer.param_groups]
            optimizer.load_state_dict(saved)
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["peak"] = peak
        self.step, self.tokens, self.spent_s = state["step"], state["tokens"], state["spent_s"]
        self.average.steps = self.step
        self.clock = self.spent_s

    def _count(self, batch: MicroBatch, losses: Tensor) -> None:
        counts = (batch.labels != IGNORED).sum(1).tolist()
        for kind, part in zip(batch.kinds, losses.split(counts), strict=True):
            self.sums[kind][0] += part.sum().item()
            self.sums[kind][1] += len(part)

    def _log(self) -> None:
        losses = {kind: round(total / count, 4) for kind, (total, count) in self.sums.items()}
        rate = round(self.tokens / self.spent_s)
        line = {"run": self.name, "step": self.step, "s": round(self.spent_s)}
        line |= {"tokens": self.tokens, "rate": rate}
        print(json.dumps(line | losses), flush=True)
        self.sums.clear()


def arguments(description: str | None, minutes: float) -> argparse.ArgumentParser:
    """What every training command takes: `minutes` by default, one process unless told."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--minutes", type=float, default=minutes)
    parser.add_argument("--rank", type=int, default=0, help="which of the processes this is")
    parser.add_argument("--world", type=int, default=1, help="how many there are, one a core")
    return parser
