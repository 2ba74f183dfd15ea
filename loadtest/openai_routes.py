"""What does the openai engine cost against the native one, on the same SGLang servers?

`python -m loadtest.openai_routes [--questions 60] [--quick] [--json]`

Two SGLang servers on the CPU (``make sglang-env``) serve the bundled policy and reward model. Each
question is searched over the native ``/generate`` and over SGLang's own OpenAI routes, one right
after the other, the cache emptied before each; which goes first alternates. Trees need not be
the same: accuracy and tokens are compared over all questions, wall by pairs.

- ``wall_ratio``: the openai engine's seconds over the native one's, the mean over pairs, with
  ``wall_ratio_ci95``; ``accuracy_diff_ci95``: likewise of right answers, as fractions.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.listed import at_least_1
from loadtest.on_sglang import (
    PATIENCE_SECONDS,
    PYTHON,
    engine_on,
    forget,
    policy_server,
    reward_server,
    started,
    to_its_end,
)
from loadtest.paired import bootstrap95, differences
from loadtest.report import publish, say
from loadtest.searches import SPRIG, Item, Method, grow, items_of
from models.tasks import TASKS
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from runtime.sglang.launched_server import LaunchedServer
from runtime.text import Text
from search.engine import Engine
from search.spec import SearchSpec

COLUMNS = ("engine", "task", "n", "accuracy", "tokens", "prefilled", "cached", "seconds")
TASK_NAMES = ("game24", "countdown")
SPEC = SearchSpec(policy="rebase", width=8)
POOL_TOKENS = 20_000
NATIVE, OPENAI = "sglang", "openai"


@dataclass(frozen=True, slots=True)
class Searched:
    """One search. ``tokens``: of its tree."""

    right: bool
    tokens: int
    prefilled: int
    cached: int
    seconds: float


@asynccontextmanager
async def openai_on(policy: LaunchedServer, reward: LaunchedServer) -> AsyncIterator[OpenaiEngine]:
    """The openai engine on servers that run."""
    assert SPRIG.prm is not None, "the bundled models have a reward model"
    options = OpenaiOptions(
        policy=ServedModel(SPRIG.policy, (policy.url,)),
        reward=ServedModel(SPRIG.prm, (reward.url,)),
        reward_format=SPRIG.reward_format,
        connect_seconds=PATIENCE_SECONDS,
        probe_seconds=PATIENCE_SECONDS,
    )
    engine = await OpenaiEngine.start(options)
    try:
        yield engine
    finally:
        await engine.close()


async def searched(engine: Engine, text: Text, item: Item, name: str) -> Searched:
    """Search a question."""
    begun = time.monotonic()
    outcome = await grow(engine, text, item, Method(name, SPEC))
    seconds, costs = time.monotonic() - begun, outcome.stats.engine
    return Searched(
        outcome.text is not None and TASKS[item.task].check(item.question, outcome.text).correct,
        outcome.tree.generated_tokens,
        costs.prefilled_tokens,
        costs.cached_tokens,
        seconds,
    )


async def measure(python: Path, questions: int) -> dict[str, Any]:
    """Two rows a task, and how the pairs compare."""
    servers = [policy_server(python, "lru", POOL_TOKENS), reward_server(python, POOL_TOKENS)]
    items = [item for task in TASK_NAMES for item in items_of(task, "test", questions, 0)]
    searches: dict[str, list[Searched]] = {NATIVE: [], OPENAI: []}
    text = Text(SPRIG.policy)
    async with (
        started(servers),
        engine_on(servers[:1], servers[1:]) as native,
        openai_on(*servers) as openai,
    ):
        engines: list[tuple[str, Engine]] = [(NATIVE, native), (OPENAI, openai)]
        for number, item in enumerate(items):
            for name, engine in engines if number % 2 else reversed(engines):
                await forget(servers)
                searches[name].append(await searched(engine, text, item, name))
            say(f"{number + 1} of {len(items)}")
    rows = [row(name, task, items, searches[name]) for task in TASK_NAMES for name in searches]
    return {"rows": rows, **compared(searches[OPENAI], searches[NATIVE])}


def row(
    name: str, task: str, items: Sequence[Item], searches: Sequence[Searched]
) -> dict[str, Any]:
    """An engine's searches of one task, as means."""
    own = [one for item, one in zip(items, searches, strict=True) if item.task == task]

    def mean(field: str) -> float:
        return sum(getattr(one, field) for one in own) / len(own)

    fields = ("tokens", "prefilled", "cached", "seconds")
    means = {field: round(mean(field), 2) for field in fields}
    return {"engine": name, "task": task, "n": len(own), "accuracy": mean("right"), **means}


def compared(mine: Sequence[Searched], other: Sequence[Searched]) -> dict[str, Any]:
    """Pair by pair."""
    ratios = [a.seconds / b.seconds for a, b in zip(mine, other, strict=True)]
    right = differences([one.right for one in mine], [one.right for one in other])
    tokens = [float(a.tokens - b.tokens) for a, b in zip(mine, other, strict=True)]
    return {
        "wall_ratio": sum(ratios) / len(ratios),
        "wall_ratio_ci95": bootstrap95(ratios),
        "accuracy_diff_ci95": bootstrap95(right),
        "tokens_diff_ci95": bootstrap95(tokens),
    }


def main() -> None:
    """Print a table, or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--python", type=Path, default=PYTHON)
    parser.add_argument("--questions", type=at_least_1, help="of each task")
    parser.add_argument("--quick", action="store_true", help="6 questions of each task, not 60")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    wanted = parser.parse_args()
    questions = wanted.questions or (6 if wanted.quick else 60)
    document = to_its_end(measure(wanted.python, questions))
    publish(document, wanted.json, "SGLang's OpenAI routes against its own", COLUMNS)


if __name__ == "__main__":
    main()
