"""Searches for the benchmarks: an embedded engine on the bundled models, and questions to grow."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, TypeVar

from cli.evaluation import item_seed
from loadtest.decisions import PolicyOf
from models.bundled import SPRIG_FOLDER
from models.tasks import TASKS
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.text import Text
from search.context_limit import context_for
from search.controller import search
from search.engine import Engine
from search.outcome import Outcome
from search.policies.policy import Policy
from search.policies.registry import POLICIES
from search.problem import Problem
from search.spec import SearchSpec

T = TypeVar("T")
U = TypeVar("U")

SPRIG = EngineOptions(
    policy=SPRIG_FOLDER / "policy",
    prm=SPRIG_FOLDER / "prm",
    reward_format="math-shepherd",
)
REBASE_8 = SearchSpec(policy="rebase", width=8)
"""A small search."""


@asynccontextmanager
async def embedded(options: EngineOptions = SPRIG, **changes: Any) -> AsyncIterator[EmbeddedEngine]:
    """An embedded engine for the length of an ``async with``; ``changes`` are EngineOptions."""
    engine = await EmbeddedEngine.start(replace(options, **changes))
    try:
        yield engine
    finally:
        await engine.close()


def policy_of_spec(spec: SearchSpec) -> Policy:
    """The policy that a spec names."""
    return POLICIES[spec.policy](spec)


@dataclass(frozen=True, slots=True)
class Method:
    """A way to search. ``name`` tells it from the others.

    ``policy_of`` makes the policy that plans its rounds; the spec may name another.
    """

    name: str
    spec: SearchSpec
    policy_of: PolicyOf = field(default=policy_of_spec)


@dataclass(frozen=True, slots=True)
class Item:
    """A question of a task, and the seed of its searches: the same for all methods."""

    task: str
    question: str
    seed: int


def items_of(task: str, split: str, limit: int, seed: int) -> list[Item]:
    """A split's first questions with their seeds: those that ``hedgerow eval`` takes."""
    questions = TASKS[task].questions(split, limit, seed)  # type: ignore[arg-type]
    return [Item(task, question, item_seed(seed, question)) for question in questions]


@cache
def bundled_text() -> Text:
    """The tokenizer and chat template of the bundled models."""
    return Text(SPRIG.policy)


async def grow(
    engine: Engine,
    item: Item,
    method: Method,
    policy_of: PolicyOf | None = None,
    *,
    text: Text | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Search one item; ``policy_of`` overrides the method's. No search may run twice at once.
    ``text``: that of models other than the bundled ones."""
    prompt = tuple(
        (text or bundled_text()).encode_chat([{"role": "user", "content": item.question}])
    )
    return await search(
        Problem(prompt=prompt, question=item.question),
        method.spec.model_copy(update={"seed": item.seed}),
        engine,
        tree_id=f"{method.name}-{method.spec.width}-{item_seed(item.seed, item.question)}",
        answer_of=TASKS[item.task].answer,
        clock=clock,
        context_tokens=context_for(method.spec, engine.capabilities),
        policy_of=policy_of or method.policy_of,
    )


async def side_by_side(
    work: Callable[[U], Awaitable[T]], items: Iterable[U], at_once: int
) -> list[T]:
    """The results of ``work`` on each item, in order; ``at_once`` are under way at a time."""
    room = asyncio.Semaphore(at_once)

    async def work_on(item: U) -> T:
        async with room:
            return await work(item)

    return await asyncio.gather(*map(work_on, items))


async def grow_all(
    engine: Engine,
    items: Iterable[Item],
    method: Method,
    at_once: int,
    policy_for: Callable[[Item], PolicyOf] | None = None,
) -> list[Outcome]:
    """Search the items, ``at_once`` side by side; in order."""

    async def grow_item(item: Item) -> Outcome:
        return await grow(engine, item, method, policy_for(item) if policy_for else None)

    return await side_by_side(grow_item, items, at_once)


def dev_questions(count: int) -> list[tuple[str, str]]:
    """(task, question) pairs of the dev split, the tasks in turn."""
    turns = itertools.cycle(
        [(name, iter(task.questions("dev", count, seed=0))) for name, task in TASKS.items()]
    )
    return [(name, next(questions)) for name, questions in itertools.islice(turns, count)]


def unlike_items(task: str, count: int) -> list[Item]:
    """``count`` items of a task's test split, no two with the same question and seed."""
    items = items_of(task, "test", count, 0)
    return [
        replace(items[n % len(items)], seed=items[n % len(items)].seed + n // len(items))
        for n in range(count)
    ]


def steps_of(outcome: Outcome) -> list[tuple[int | None, tuple[int, ...]]]:
    """A tree without its rewards, whose last digits depend on what was computed side by side."""
    return [(node.parent, node.tokens) for node in outcome.tree.nodes]
