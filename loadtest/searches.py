"""Searches for the benchmarks: an embedded engine on the bundled models, and questions to grow."""

from __future__ import annotations

import asyncio
import itertools
import time
from dataclasses import replace

from models.tasks import TASKS
from runtime.embedded.engine import EmbeddedEngine, EngineOptions
from runtime.text import Text
from search.controller import Problem, search
from search.outcome import Outcome
from search.spec import SearchSpec

SPRIG = EngineOptions(
    policy="models/sprig/policy",
    prm="models/sprig/prm",
    reward_format="math-shepherd",
)


class Engines:
    """An embedded engine for the length of an ``async with``; ``changes`` are EngineOptions."""

    def __init__(self, **changes: object) -> None:
        self._options = replace(SPRIG, **changes)  # type: ignore[arg-type]
        self._engine: EmbeddedEngine | None = None

    async def __aenter__(self) -> EmbeddedEngine:
        self._engine = await EmbeddedEngine.start(self._options)
        return self._engine

    async def __aexit__(self, *_: object) -> None:
        if self._engine is not None:
            await self._engine.close()


def dev_questions(count: int) -> list[tuple[str, str]]:
    """(task, question) pairs of the dev split, the tasks in turn."""
    turns = itertools.cycle(
        [(name, iter(task.questions("dev", count, seed=0))) for name, task in TASKS.items()]
    )
    return [(name, next(questions)) for name, questions in itertools.islice(turns, count)]


async def grow_many(
    engine: EmbeddedEngine, spec: SearchSpec, questions: int, at_once: int = 8
) -> list[Outcome]:
    """One search a dev question, ``at_once`` side by side, in the questions' order."""
    text = Text(SPRIG.policy)
    room = asyncio.Semaphore(at_once)

    async def one(number: int, task: str, question: str) -> Outcome:
        prompt = tuple(text.encode_chat([{"role": "user", "content": question}]))
        async with room:
            return await search(
                Problem(prompt=prompt, question=question),
                spec,
                engine,
                tree_id=f"{task}-{number}",
                answer_of=TASKS[task].answer,
                clock=time.monotonic,
                context_tokens=engine.capabilities.context_tokens,
            )

    return await asyncio.gather(
        *(one(i, task, q) for i, (task, q) in enumerate(dev_questions(questions)))
    )
