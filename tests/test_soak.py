"""After many searches, half of them aborted, only prompts are cached and nothing is held."""

from __future__ import annotations

import asyncio
import random
import time
from dataclasses import replace

import pytest

from models.tasks import TASKS
from runtime.embedded.embedded_engine import EmbeddedEngine
from search.controller import search
from search.events import Event
from search.problem import Problem
from search.spec import SearchSpec
from tests.closing import closing
from tests.test_same_tree import OFF, TEXT

SEARCHES = 200
AT_ONCE = 8


async def run_search(
    engine: EmbeddedEngine, number: int, question: str, stop_after: int | None
) -> None:
    """Run a search, or cancel it after ``stop_after`` events."""
    count = 0
    enough = asyncio.Event()

    def listen(_: Event) -> None:
        nonlocal count
        count += 1
        if stop_after is not None and count >= stop_after:
            enough.set()

    prompt = tuple(TEXT.encode_chat([{"role": "user", "content": question}]))
    policy = ("rebase", "beam", "best_of_n", "self_consistency")[number % 4]
    task = asyncio.create_task(
        search(
            Problem(prompt=prompt, question=question),
            SearchSpec(policy=policy, width=4, seed=number),
            engine,
            tree_id=f"search{number}",
            answer_of=lambda reply: reply or None,
            clock=time.monotonic,
            listen=listen,
            context_tokens=engine.capabilities.context_tokens,
        )
    )
    if stop_after is not None:
        waiter = asyncio.create_task(enough.wait())
        await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
        waiter.cancel()
        task.cancel()
    await asyncio.gather(task, return_exceptions=stop_after is not None)


@pytest.mark.promise(
    "Searches that are over, aborted ones included, hold nothing; only prompts that may be evicted "
    "stay cached."
)
@pytest.mark.slow
async def test_two_hundred_searches_leave_nothing_held() -> None:
    """Half are aborted midway; afterwards only evictable prompts have KV, and no slot is lost.

    The engine checks its accounting whenever it is idle; in strict mode it dies of an error.
    """
    draw = random.Random(0)
    questions = [q for task in TASKS.values() for q in task.questions("dev", 10, seed=1)]
    room = asyncio.Semaphore(AT_ONCE)

    async def guarded(engine: EmbeddedEngine, number: int) -> None:
        stop_after = draw.randrange(1, 12) if number % 2 else None
        async with room:
            await run_search(engine, number, draw.choice(questions), stop_after)

    async with closing(await EmbeddedEngine.start(replace(OFF, batch_limit=32))) as engine:
        await asyncio.gather(*(guarded(engine, number) for number in range(SEARCHES)))
        usage = await engine.usage()
        await engine.health()
    prompts = {tuple(TEXT.encode_chat([{"role": "user", "content": q}])) for q in questions}
    assert usage.running == usage.waiting == 0
    assert usage.kv_tokens_active == usage.prm_kv_tokens_active == 0
    assert 0 < usage.kv_tokens_cached <= sum(len(p) for p in prompts)
    assert usage.prm_kv_tokens_cached <= sum(len(p) for p in prompts)
