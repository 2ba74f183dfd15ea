"""Train the policy: `python -m models.train.policy --phase learn`, then `--phase refine`.

Either phase resumes where it stopped. One process a core: `--world 2` with `--rank 0` in one and
`--rank 1` in the other. `refine` starts from the policy as it is and wants samples of it to judge
(`models.train.prm_data`).
"""

import argparse
import copy
import json
import random
import signal
import time
from collections import defaultdict
from typing import NamedTuple

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
from models.train.corpus import MIXTURE, REFINED
from models.train.network import logits_at, new_model
from models.train.optimizer import optimizers, set_rate
from models.train.prm_data import load_verdicts

SEED = 2
EXAMPLES_A_STEP = 40
"""In all processes together."""
SAVE_EVERY_S = 150
LOG_EVERY = 20
SHARPNESS = 1.5
"""What is exported says at temperature 1 what was learnt at temperature 1/1.5."""


class Phase(NamedTuple):
    """One run over one mixture: how long, from what, and how fast beside the first."""

    minutes: float
    mixture: dict[str, float]
    start: str | None
    rate_scale: float


PHASES = {
    "learn": Phase(80, MIXTURE, None, 1.0),
    "refine": Phase(42, REFINED, "policy", 0.6),
}


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


def scaled(model: LlamaForCausalLM, by: float) -> LlamaForCausalLM:
    """A copy whose logits are scaled, by way of the last norm, which the tied output reads."""
    copied = copy.deepcopy(model)
    with torch.no_grad():
        copied.model.norm.weight.mul_(by)
    return copied


class Run:
    """A training run: the weights, their average, the optimizers, and the time already spent."""

    def __init__(self, name: str, phase: Phase, rank: int, world: int) -> None:
        self.name, self.phase, self.rank, self.world = name, phase, rank, world
        self.budget_s = phase.minutes * 60
        parallel.join(name, rank, world)
        self.tokenizer = load_tokenizer()
        self.verdicts = load_verdicts(self.tokenizer) if "verdict" in phase.mixture else None
        if phase.start is None:
            self.model = new_model("policy", self.tokenizer, SEED)
        else:
            self.model = scaled(checkpoint.load_model(phase.start), 1 / SHARPNESS)
        self.built = optimizers(self.model, phase.rate_scale, rank, world)
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
            checkpoint.export(scaled(self.average.model, SHARPNESS), self.tokenizer, "policy")

    def take_step(self, sums: dict[str, list[float]]) -> None:
        """One optimizer step over fresh examples, together with the other processes."""
        started = time.monotonic()
        rng = random.Random(f"{self.name} {SEED} {self.step} {self.rank}")
        count = EXAMPLES_A_STEP // self.world
        rows = draw_rows(self.tokenizer, rng, self.phase.mixture, count, self.verdicts)
        learnt = sum(label != IGNORED for row in rows for label in row.labels)
        for batch in micro_batches(rows, pad_id(self.tokenizer)):
            losses = token_losses(self.model, batch)
            (losses.sum() / learnt).backward()
            by_kind(batch, losses, sums)
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


def train(run: Run) -> None:
    """Step until the budget is spent or SIGTERM comes; log and save along the way."""
    signal.signal(signal.SIGTERM, lambda *_: run.stop())
    saved, sums = run.clock, defaultdict(lambda: [0.0, 0])
    while run.clock < run.budget_s and not run.stopped:
        run.take_step(sums)
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
    """Train or resume a phase."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--phase", choices=PHASES, required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--world", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(1)
    name = f"policy.{options.phase}"
    train(Run(name, PHASES[options.phase], options.rank, options.world))


if __name__ == "__main__":
    main()
