"""Train the policy: `python -m models.train.policy --minutes 80`. Resumes where it stopped.

One process a core: start it once with `--rank 0` and once with `--rank 1`.
"""

import argparse
import copy
import json
import random
import signal
import time
from collections import defaultdict

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import LlamaForCausalLM

from models.train import checkpoint, parallel
from models.train.batches import (
    IGNORED,
    MicroBatch,
    draw_rows,
    load_tokenizer,
    micro_batches,
    pad_id,
)
from models.train.corpus import MIXTURE
from models.train.network import logits_at, new_model
from models.train.optimizer import optimizers, set_rate

SEED = 2
WORLD = 2
EXAMPLES_A_STEP = 20
"""In each process."""
SAVE_EVERY_S = 150
LOG_EVERY = 20
SHARPNESS = 1.5
"""What is exported says at temperature 1 what was learnt at temperature 1/1.5."""


def token_losses(model: LlamaForCausalLM, batch: MicroBatch) -> Tensor:
    """The loss at every learnt position, row by row."""
    learnt = batch.labels != IGNORED
    logits = logits_at(model, batch.ids, learnt)
    return F.cross_entropy(logits, batch.labels[learnt], reduction="none")


def by_kind(batch: MicroBatch, losses: Tensor, sums: dict[str, list[float]]) -> None:
    """Add each row's loss and token count to its kind's."""
    counts = (batch.labels != IGNORED).sum(1).tolist()
    for kind, part in zip(batch.kinds, losses.detach().split(counts), strict=True):
        sums[kind][0] += part.sum().item()
        sums[kind][1] += len(part)


def sharpened(model: LlamaForCausalLM) -> LlamaForCausalLM:
    """A copy whose logits are scaled, by way of the last norm, which the tied output reads."""
    copied = copy.deepcopy(model)
    copied.model.norm.weight.mul_(SHARPNESS)
    return copied


class Run:
    """A training run: the weights, their average, the optimizers, and the time already spent."""

    def __init__(self, name: str, shape: str, budget_s: float, rank: int) -> None:
        self.name, self.budget_s, self.rank = name, budget_s, rank
        parallel.join(name, rank, WORLD)
        self.tokenizer = load_tokenizer()
        self.model = new_model(shape, self.tokenizer, SEED)
        self.built = optimizers(self.model, rank=rank, world=WORLD)
        self.average = checkpoint.Average(self.model)
        self.step, self.tokens, self.spent_s = 0, 0, 0.0
        self.stopping = self.stopped = False
        self.clock = 0.0
        """The time spent as all processes last agreed on it."""
        state = checkpoint.load(f"{name}.{rank}")
        if state is not None:
            self._restore(state)

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

    def save(self) -> None:
        """Checkpoint, and export the averaged weights."""
        checkpoint.save(
            f"{self.name}.{self.rank}",
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
            checkpoint.export(sharpened(self.average.model), self.tokenizer, self.name)

    def take_step(self, mixture: dict[str, float], sums: dict[str, list[float]]) -> None:
        """One optimizer step over fresh examples, together with the other processes."""
        started = time.monotonic()
        rng = random.Random(f"{self.name} {SEED} {self.step} {self.rank}")
        rows = draw_rows(self.tokenizer, rng, mixture, EXAMPLES_A_STEP)
        learnt = sum(label != IGNORED for row in rows for label in row.labels)
        for batch in micro_batches(rows, pad_id(self.tokenizer)):
            losses = token_losses(self.model, batch)
            (losses.sum() / learnt).backward()
            by_kind(batch, losses, sums)
        tokens = sum(len(row.ids) for row in rows)
        local = [tokens, self.spent_s, self.stopping]
        total, spent, stopping = parallel.sum_gradients(self.model, local)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        set_rate(self.built, spent / WORLD / self.budget_s)
        for optimizer in self.built:
            optimizer.step()
        self.model.zero_grad()
        parallel.share_matrices(self.model, WORLD)
        self.average.update(self.model)
        self.step += 1
        self.tokens += round(total)
        self.spent_s = spent / WORLD + time.monotonic() - started
        self.clock = spent / WORLD
        self.stopped = stopping > 0

    def stop(self) -> None:
        """Ask all processes to end after the step in which they hear of it."""
        self.stopping = True


def train(run: Run, mixture: dict[str, float]) -> None:
    """Step until the budget is spent or SIGTERM comes; log and save along the way."""
    signal.signal(signal.SIGTERM, lambda *_: run.stop())
    saved, sums = run.clock, defaultdict(lambda: [0.0, 0])
    while run.clock < run.budget_s and not run.stopped:
        run.take_step(mixture, sums)
        if run.step % LOG_EVERY == 0:
            losses = {kind: round(total / count, 4) for kind, (total, count) in sums.items()}
            rate = round(run.tokens / run.spent_s)
            line = {"step": run.step, "s": round(run.spent_s), "tokens": run.tokens, "rate": rate}
            print(json.dumps(line | losses), flush=True)
            sums.clear()
        if run.clock - saved > SAVE_EVERY_S:
            run.save()
            saved = run.clock
    run.save()


def main() -> None:
    """Train or resume the policy."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=80)
    parser.add_argument("--rank", type=int, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    train(Run("policy", "policy", options.minutes * 60, options.rank), MIXTURE)


if __name__ == "__main__":
    main()
