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

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from loadtest.compare import Results, result_of
from loadtest.kept import Result, kept_results, of_search
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
from loadtest.searches import REBASE_8, SPRIG, Item, Method, embedded, grow, items_of, side_by_side
from search.engine import Engine
from search.stats import SearchStats

COLUMNS = ("engine", "task", "n", "accuracy", "tokens", "prefilled", "cached", "seconds")
TASK_NAMES = ("game24", "countdown")
AT_ONCE = 4
POOL_TOKENS = 20_000


async def searched(name: str, engine: Engine, items: Sequence[Item], path: Path | None) -> Results:
    """Run each item's search; those kept in the file ``path`` are not run again."""
    method, store = Method(name, REBASE_8), kept_results(path, name)

    async def search_item(item: Item) -> Result:
        result = store.get(of_search(item, method))
        if result is None:
            result = result_of(item, await grow(engine, item, method))
            store.put(of_search(item, method), result)
            say(f"{name}, {item.task}: {'right' if result.correct else 'wrong'}")
        return result

    return Results(method, await side_by_side(search_item, items, AT_ONCE))


async def over_vllm(items: Sequence[Item], path: Path | None) -> dict[str, Any]:
    """Compare searches on vLLM with the embedded engine's."""
    async with embedded(threads=1) as engine:
        reference = await searched("embedded", engine, items, path)
    policy = VllmServer(Path(SPRIG.policy), POLICY_OPTIONS)
    reward = VllmServer(Path(str(SPRIG.prm)))
    async with serving([policy, reward]), engine_at(policy.url, reward.url) as engine:
        vllm = await searched("vllm", engine, items, path)
    return summary(items, [reference, vllm])


async def over_sglang(items: Sequence[Item], python: Path) -> dict[str, Any]:
    """Compare searches on SGLang by its two interfaces."""
    servers = [policy_server(python, "lru", POOL_TOKENS), reward_server(python, POOL_TOKENS)]
    native, openai = (Results(Method(name, REBASE_8)) for name in ("sglang", "openai"))
    async with (
        started(servers),
        engine_on(servers[:1], servers[1:]) as on_native,
        engine_at(*(server.url for server in servers)) as on_openai,
    ):
        sides: list[tuple[Results, Engine]] = [(native, on_native), (openai, on_openai)]
        for number, item in enumerate(items):
            for side, engine in sides if number % 2 else reversed(sides):
                await forget(servers)
                outcome = await grow(engine, item, side.method)
                side.results.append(result_of(item, outcome))
            say(f"{number + 1} of {len(items)}")
    return summary(items, [native, openai]) | compared(openai.results, native.results)


def summary(items: Sequence[Item], sides: Sequence[Results]) -> dict[str, Any]:
    """A row per task and engine; the second engine is compared with the first."""
    places = {task: [n for n, item in enumerate(items) if item.task == task] for task in TASK_NAMES}
    rows = [
        row(side.method, task, [side.results[n] for n in places[task]])
        for task in TASK_NAMES
        for side in sides
    ]
    other, mine = (side.correct for side in sides)
    gained = differences(mine, other)
    by_task = {task: bootstrap95([gained[n] for n in at]) for task, at in places.items()}
    return {"rows": rows, "accuracy_diff_ci95": bootstrap95(gained), "by_task": by_task}


def row(method: Method, task: str, results: Sequence[Result]) -> dict[str, Any]:
    """The means of an engine's searches of one task."""

    def mean(of: Callable[[SearchStats], float]) -> float:
        return round(sum(of(result.stats) for result in results) / len(results), 2)

    return {
        "engine": method.name,
        "task": task,
        "n": len(results),
        "policy": method.spec.policy,
        "width": method.spec.width,
        "accuracy": sum(result.correct for result in results) / len(results),
        "tokens": mean(lambda stats: stats.generated_tokens),
        "prefilled": mean(lambda stats: stats.engine.prefilled_tokens),
        "cached": mean(lambda stats: stats.engine.cached_tokens),
        "seconds": mean(lambda stats: stats.seconds),
    }


def compared(mine: Sequence[Result], other: Sequence[Result]) -> dict[str, Any]:
    """The cost of ``mine`` relative to ``other``, paired by item."""
    pairs = [(a.stats, b.stats) for a, b in zip(mine, other, strict=True)]
    ratios = [a.seconds / b.seconds for a, b in pairs]
    return {
        "wall_ratio": sum(ratios) / len(ratios),
        "wall_ratio_ci95": bootstrap95(ratios),
        "tokens_diff_ci95": bootstrap95(
            [float(a.generated_tokens - b.generated_tokens) for a, b in pairs]
        ),
    }


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser(
        "openai_accuracy", __doc__, "keep", "python", quick="6 questions of each task, not 60"
    )
    parser.add_argument("--servers", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--questions", type=at_least(1), help="of each task")
    options = parser.parse_args()
    questions = options.questions or (6 if options.quick else 60)
    items = [item for task in TASK_NAMES for item in items_of(task, "test", questions, 0)]
    work = (
        over_vllm(items, options.kept_in)
        if options.servers == "vllm"
        else over_sglang(items, options.python)
    )
    publish(to_its_end(work), options.json, "OpenAI-compatible servers", COLUMNS)


if __name__ == "__main__":
    main()
