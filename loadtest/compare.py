"""Compare methods on the same items: accuracy, KV and cost; shared samples are drawn once."""

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
        """The sum of ``of(stats)`` over the items."""
        return math.fsum(of(result.stats) for result in self.results)

    @property
    def digest(self) -> str:
        """The combined digest of all trees."""
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
    """Run every method on every item; results in the methods' order.

    ``keep_rounds``: the number of first items whose decisions are kept. ``kept_in``: a file of
    results that are not computed again, to which new ones are added.
    """
    costs = [ModelConfig.from_checkpoint(path).flops for path in (SPRIG.policy, SPRIG.prm) if path]
    store = kept_results(kept_in, engine.capabilities.fingerprint)
    widest_first = sorted(range(len(methods)), key=lambda i: -methods[i].spec.width)
    compared = count(1)

    async def compare_item(numbered: tuple[int, Item]) -> dict[int, Result]:
        number, item = numbered
        keeps_rounds = number < keep_rounds
        shared = SharedSamples(engine, *costs)
        results: dict[int, Result] = {}
        for i in widest_first:
            key = of_search(item, methods[i])
            result = store.get(key)
            if result is None or (keeps_rounds and not result.rounds):
                decisions = Decisions()
                policy_of = noting(methods[i].policy_of, decisions, time.perf_counter)
                outcome = await grow(shared, item, methods[i], policy_of)
                rounds = tuple(decisions.rounds) if keeps_rounds else ()
                result = result_of(item, outcome, rounds)
                store.put(key, result)
            results[i] = result
        say(f"{item.task}: {next(compared)} of {len(items)} questions compared")
        return results

    by_item = await side_by_side(compare_item, enumerate(items), at_once)
    return [Results(m, [results[i] for results in by_item]) for i, m in enumerate(methods)]


def result_of(item: Item, outcome: Outcome, rounds: tuple[Round, ...] = ()) -> Result:
    """The result of a search of an item; ``rounds``: its decisions, if they are kept."""
    task = TASKS[item.task]
    trial = judge(task, item.question, outcome)
    fault = task.first_illegal(item.question, outcome.text)
    illegal = None if outcome.chosen is None else fault is not None
    return Result(trial.correct, trial.any_correct, illegal, outcome.stats, outcome.digest, rounds)
