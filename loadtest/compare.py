"""Methods on the same items: accuracy, KV and cost, what they have in common drawn once."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path

from cli.evaluation import judge
from cli.shared_samples import SharedSamples
from loadtest.decisions import Decisions, noting
from loadtest.kept import Result, kept_results, of_search
from loadtest.report import say
from loadtest.searches import SPRIG, Item, Method, grow, side_by_side
from models.tasks import TASKS
from runtime.embedded.model.config import ModelConfig
from search.engine import Engine
from search.outcome import Outcome
from search.policies.policy import Round
from search.stats import SearchStats
from search.tree import combined_digest


@dataclass(frozen=True, slots=True)
class Results:
    """A method's results, in the items' order."""

    method: Method
    results: list[Result] = field(default_factory=list)

    @property
    def correct(self) -> list[bool]:
        """Whether each item's reply is right."""
        return [result.correct for result in self.results]

    @property
    def accuracy(self) -> float:
        """The share of right replies."""
        return sum(self.correct) / len(self.results)

    def total(self, of: Callable[[SearchStats], float]) -> float:
        """The sum of a number over the items."""
        return math.fsum(of(result.stats) for result in self.results)

    @property
    def digest(self) -> str:
        """Over all trees."""
        return combined_digest(result.digest for result in self.results)


async def compare(
    engine: Engine,
    items: Sequence[Item],
    methods: Sequence[Method],
    *,
    at_once: int = 8,
    keep_rounds: int = 0,
    kept_in: Path | None = None,
) -> list[Results]:
    """Every method on every item, in the methods' order.

    ``keep_rounds``: of the first so many items the decisions are kept. ``kept_in``: a file of
    results, from which those known already are taken and to which the others are added.
    """
    costs = [ModelConfig.from_checkpoint(path).flops for path in (SPRIG.policy, SPRIG.prm) if path]
    kept = kept_results(kept_in, engine.capabilities.fingerprint)
    widest_first = sorted(range(len(methods)), key=lambda i: -methods[i].spec.width)
    compared = count(1)

    async def one(numbered: tuple[int, Item]) -> dict[int, Result]:
        number, item = numbered
        rounds_kept = number < keep_rounds
        shared = SharedSamples(engine, *costs)
        found: dict[int, Result] = {}
        for i in widest_first:
            of = of_search(item, methods[i])
            known = kept.get(of)
            if known is None or (rounds_kept and not known.rounds):
                noted = Decisions()
                policy_of = noting(methods[i].policy_of, noted, time.perf_counter)
                outcome = await grow(shared, item, methods[i], policy_of)
                rounds = tuple(noted.rounds) if rounds_kept else ()
                known = result_of(item, outcome, rounds)
                kept.put(of, known)
            found[i] = known
        say(f"{item.task}: {next(compared)} of {len(items)} questions compared")
        return found

    by_item = await side_by_side(one, enumerate(items), at_once)
    return [Results(m, [found[i] for found in by_item]) for i, m in enumerate(methods)]


def result_of(item: Item, outcome: Outcome, rounds: tuple[Round, ...] = ()) -> Result:
    """What a search of an item came to; ``rounds``: its decisions, where they are kept."""
    task = TASKS[item.task]
    trial = judge(task, item.question, outcome)
    fault = task.first_illegal(item.question, outcome.text)
    illegal = None if outcome.chosen is None else fault is not None
    return Result(trial.correct, trial.any_correct, illegal, outcome.stats, outcome.digest, rounds)
