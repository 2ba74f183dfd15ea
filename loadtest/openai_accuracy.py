"""Does a search over OpenAI-compatible servers find the right answers, and what does it cost?

`python -m loadtest.openai_accuracy [--servers vllm|sglang] [--questions 60] [--quick] [--json]`

The same test questions of each task are searched by the openai engine and by another one, over the
bundled models, by the same policy, width and seeds:

- ``vllm``: on real vLLM on the CPU (``make vllm-env``), and in the embedded engine. The two draw by
  other noise, so that trees differ. With ``--keep`` a run that was cut off goes on from there.
- ``sglang``: by the OpenAI routes of two SGLang servers on the CPU (``make sglang-env``), and by
  their native ``/generate``, one right after the other, the cache emptied before each; which goes
  first alternates. ``wall_ratio`` with ``wall_ratio_ci95``: the openai engine's seconds over the
  native one's, the mean over pairs; ``tokens_diff_ci95`` likewise.

``accuracy``, ``tokens``, ``seconds``: right replies, and tokens of a tree, as means over questions.
``accuracy_diff_ci95``: the openai engine's less the other's over all questions, in pairs, as
fractions; ``by_task`` has it for each task.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cli.kept_lines import KeptLines
from loadtest.on_sglang import (
    engine_on,
    forget,
    policy_server,
    reward_server,
    started,
    to_its_end,
)
from loadtest.on_vllm import POLICY_OPTIONS, VllmServer, engine_at, serving
from loadtest.options import BenchmarkParser, at_least
from loadtest.paired import bootstrap95, differences
from loadtest.report import publish, say
from loadtest.searches import REBASE_8, SPRIG, Engines, Item, Method, grow, items_of, side_by_side
from models.tasks import TASKS
from runtime.text import Text
from search.engine import Engine

COLUMNS = ("engine", "task", "n", "accuracy", "tokens", "prefilled", "cached", "seconds")
TASK_NAMES = ("game24", "countdown")
AT_ONCE = 4
POOL_TOKENS = 20_000


@dataclass(frozen=True, slots=True)
class Searched:
    """One search. ``tokens``: of its tree."""

    right: bool
    tokens: int
    prefilled: int
    cached: int
    seconds: float


class KeptSearches:
    """Searches by engine and question, in a file (none if it is None)."""

    def __init__(self, path: Path | None) -> None:
        self._lines = KeptLines(path, REBASE_8.model_dump_json(), TypeAdapter(Searched))
        self._text = Text(SPRIG.policy)

    async def run(self, name: str, engine: Engine, items: Sequence[Item]) -> list[Searched]:
        """Each item's search; those that are kept are not run again."""

        async def one(item: Item) -> Searched:
            of = f"{name} {item.task} {item.seed}"
            ended = self._lines.get(of)
            if ended is None:
                ended = await searched(engine, self._text, item, name)
                self._lines.put(of, ended)
                say(f"{name}, {item.task}: {'right' if ended.right else 'wrong'}")
            return ended

        return await side_by_side(one, items, AT_ONCE)


async def searched(engine: Engine, text: Text, item: Item, name: str) -> Searched:
    """Search a question."""
    begun = time.monotonic()
    outcome = await grow(engine, text, item, Method(name, REBASE_8))
    seconds, costs = time.monotonic() - begun, outcome.stats.engine
    return Searched(
        outcome.text is not None and TASKS[item.task].check(item.question, outcome.text).correct,
        outcome.tree.generated_tokens,
        costs.prefilled_tokens,
        costs.cached_tokens,
        seconds,
    )


async def over_vllm(items: Sequence[Item], path: Path | None) -> dict[str, Any]:
    """vLLM's searches and the embedded engine's."""
    kept = KeptSearches(path)
    async with Engines(threads=1) as engine:
        embedded = await kept.run("embedded", engine, items)
    policy = VllmServer(Path(SPRIG.policy), POLICY_OPTIONS)
    reward = VllmServer(Path(str(SPRIG.prm)))
    async with serving([policy, reward]), engine_at(policy.url, reward.url) as engine:
        vllm = await kept.run("vllm", engine, items)
    return summary(items, {"embedded": embedded, "vllm": vllm})


async def over_sglang(items: Sequence[Item], python: Path) -> dict[str, Any]:
    """SGLang's, by either of its interfaces."""
    servers = [policy_server(python, "lru", POOL_TOKENS), reward_server(python, POOL_TOKENS)]
    searches: dict[str, list[Searched]] = {"sglang": [], "openai": []}
    text = Text(SPRIG.policy)
    async with (
        started(servers),
        engine_on(servers[:1], servers[1:]) as native,
        engine_at(*(server.url for server in servers)) as openai,
    ):
        engines: list[tuple[str, Engine]] = [("sglang", native), ("openai", openai)]
        for number, item in enumerate(items):
            for name, engine in engines if number % 2 else reversed(engines):
                await forget(servers)
                searches[name].append(await searched(engine, text, item, name))
            say(f"{number + 1} of {len(items)}")
    return summary(items, searches) | compared(searches["openai"], searches["sglang"])


def summary(items: Sequence[Item], searches: dict[str, list[Searched]]) -> dict[str, Any]:
    """A row a task and an engine, of which the second is compared with the first."""
    places = {task: [n for n, item in enumerate(items) if item.task == task] for task in TASK_NAMES}
    rows = [
        row(name, task, [of_engine[n] for n in places[task]])
        for task in TASK_NAMES
        for name, of_engine in searches.items()
    ]
    other, mine = ([one.right for one in of_engine] for of_engine in searches.values())
    gained = differences(mine, other)
    by_task = {task: bootstrap95([gained[n] for n in at]) for task, at in places.items()}
    return {"rows": rows, "accuracy_diff_ci95": bootstrap95(gained), "by_task": by_task}


def row(name: str, task: str, searches: Sequence[Searched]) -> dict[str, Any]:
    """An engine's searches of one task, as means."""

    def mean(field: str) -> float:
        return sum(getattr(one, field) for one in searches) / len(searches)

    return {
        "engine": name,
        "task": task,
        "n": len(searches),
        "policy": REBASE_8.policy,
        "width": REBASE_8.width,
        "accuracy": mean("right"),
        **{field: round(mean(field), 2) for field in ("tokens", "prefilled", "cached", "seconds")},
    }


def compared(mine: Sequence[Searched], other: Sequence[Searched]) -> dict[str, Any]:
    """What searches cost, pair by pair."""
    ratios = [a.seconds / b.seconds for a, b in zip(mine, other, strict=True)]
    tokens = [float(a.tokens - b.tokens) for a, b in zip(mine, other, strict=True)]
    return {
        "wall_ratio": sum(ratios) / len(ratios),
        "wall_ratio_ci95": bootstrap95(ratios),
        "tokens_diff_ci95": bootstrap95(tokens),
    }


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser(
        "openai_accuracy", __doc__, "keep", "python", quick="6 questions of each task, not 60"
    )
    parser.add_argument("--servers", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--questions", type=at_least(1), help="of each task")
    wanted = parser.parse_args()
    questions = wanted.questions or (6 if wanted.quick else 60)
    items = [item for task in TASK_NAMES for item in items_of(task, "test", questions, 0)]
    work = (
        over_vllm(items, wanted.kept_in)
        if wanted.servers == "vllm"
        else over_sglang(items, wanted.python)
    )
    publish(to_its_end(work), wanted.json, "OpenAI-compatible servers", COLUMNS)


if __name__ == "__main__":
    main()
