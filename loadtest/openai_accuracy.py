"""Does a search over vLLM find the right answers as often as one on the embedded engine?

`python -m loadtest.openai_accuracy [--questions 60] [--quick] [--state FILE] [--json]`

Real vLLM on the CPU (``make vllm-env``) serves the bundled policy and reward model. The same test
questions of each task are searched over it and on the embedded engine, by the same policy, width
and seeds; the two draw by other noise, so that trees differ. What has ended stands in the file, so
that a run that was cut off goes on from there.

- ``accuracy``, ``tokens``: right replies, and tokens of a tree, as means over the questions;
- ``accuracy_diff_ci95``: vLLM's less the embedded engine's over all questions, in pairs, as
  fractions; ``by_task`` has it for each task.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cli.kept_lines import KeptLines
from loadtest.listed import at_least_1
from loadtest.on_sglang import to_its_end
from loadtest.on_vllm import POLICY_OPTIONS, VllmServer, serving
from loadtest.openai_kills import engine_at
from loadtest.openai_routes import SPEC, TASK_NAMES, Searched, searched
from loadtest.paired import bootstrap95, differences
from loadtest.report import publish, say
from loadtest.searches import SPRIG, Engines, Item, items_of, side_by_side
from runtime.text import Text
from search.engine import Engine

COLUMNS = ("engine", "task", "n", "accuracy", "tokens", "seconds")
AT_ONCE = 4
VLLM, EMBEDDED = "vllm", "embedded"


class KeptSearches:
    """Searches by engine and question, in a file (none if it is None)."""

    def __init__(self, path: Path | None) -> None:
        self._lines = KeptLines(path, SPEC.model_dump_json(), TypeAdapter(Searched))
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


async def measure(path: Path | None, questions: int) -> dict[str, Any]:
    """A row an engine and a task, and the pairs' difference."""
    kept = KeptSearches(path)
    items = [item for task in TASK_NAMES for item in items_of(task, "test", questions, 0)]
    searches: dict[str, list[Searched]] = {}
    async with Engines(threads=1) as embedded:
        searches[EMBEDDED] = await kept.run(EMBEDDED, embedded, items)
    policy = VllmServer(Path(SPRIG.policy), POLICY_OPTIONS)
    reward = VllmServer(Path(str(SPRIG.prm)))
    async with serving([policy, reward]), engine_at(policy.url, reward.url) as over_vllm:
        searches[VLLM] = await kept.run(VLLM, over_vllm, items)
    return summary(items, searches)


def summary(items: Sequence[Item], searches: dict[str, list[Searched]]) -> dict[str, Any]:
    """The document."""
    places = {task: [n for n, item in enumerate(items) if item.task == task] for task in TASK_NAMES}
    rows = [
        row(name, task, [of_engine[n] for n in places[task]])
        for task in TASK_NAMES
        for name, of_engine in searches.items()
    ]
    gained = differences(*([one.right for one in searches[name]] for name in (VLLM, EMBEDDED)))
    by_task = {task: bootstrap95([gained[n] for n in at]) for task, at in places.items()}
    return {"rows": rows, "accuracy_diff_ci95": bootstrap95(gained), "by_task": by_task}


def row(name: str, task: str, searches: Sequence[Searched]) -> dict[str, Any]:
    """An engine's searches of one task."""
    count = len(searches)
    return {
        "engine": name,
        "task": task,
        "n": count,
        "policy": SPEC.policy,
        "width": SPEC.width,
        "accuracy": sum(one.right for one in searches) / count,
        "tokens": round(sum(one.tokens for one in searches) / count, 2),
        "seconds": round(sum(one.seconds for one in searches) / count, 2),
    }


def main() -> None:
    """Print a table, or one JSON document."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--questions", type=at_least_1, help="of each task")
    parser.add_argument("--quick", action="store_true", help="6 questions of each task, not 60")
    parser.add_argument("--state", type=Path, help="a file of what has ended; none by default")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    wanted = parser.parse_args()
    questions = wanted.questions or (6 if wanted.quick else 60)
    document = to_its_end(measure(wanted.state, questions))
    publish(document, wanted.json, "vLLM against the embedded engine", COLUMNS)


if __name__ == "__main__":
    main()
