"""Faults on the wires between a server and the servers of its models: stubs of SGLang or of vLLM,
or SGLang itself."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from typing import Any

import httpx

from loadtest.hostile.completions_stub import CompletionsStub
from loadtest.hostile.history import Asked, StageHistory, checked
from loadtest.hostile.rest import counts_at_rest, more
from loadtest.hostile.searches import in_company
from loadtest.hostile.sglang_stub import Stub
from loadtest.hostile.toxics import Proxy, listening
from loadtest.on_sglang import PYTHON, policy_server, reward_server, started
from loadtest.served import Served
from models.bundled import SPRIG_FOLDER
from runtime.text import Text

AT_ONCE = 8
REPLICAS = 2
SHARE = 0.1
"""The share of the answers on a wire that have a fault."""
STALL_SECONDS = 2.0
SILENCE = 4.0
"""Seconds of silence: more than STALL_SECONDS, after which a server counts as lost."""
KV_TOKENS = 20_000


async def _faulty(
    engine: str,
    policies: Sequence[int],
    rewards: Sequence[int],
    numbers: Sequence[int],
    store: StageHistory,
) -> list[Asked]:
    """Run searches over faulty wires, then again over sound ones; servers are given by port."""
    async with AsyncExitStack() as stack:
        wires = [Proxy(port, silence=SILENCE) for port in (*policies, *rewards)]
        ports = [await stack.enter_async_context(listening(wire.connection)) for wire in wires]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        served = await asyncio.to_thread(
            Served,
            engine=engine,
            policy_urls=",".join(urls[: len(policies)]),
            reward_urls=",".join(urls[len(policies) :]),
            stall_seconds=STALL_SECONDS,
        )
        try:
            base = await counts_at_rest(served)
            for wire in wires:
                wire.share = SHARE
            disturbed = await in_company(served.url, numbers, AT_ONCE)
            for wire in wires:
                wire.share = 0.0
            again = await in_company(served.url, numbers, AT_ONCE)
            now = await counts_at_rest(served, base)
        finally:
            await asyncio.to_thread(served.stop)
        toxics = sum((wire.done for wire in wires), start=Counter())
        store.note(toxics=dict(toxics), held_more=more(now, base))
    return disturbed + again


@asynccontextmanager
async def _stubs(engine: str) -> AsyncIterator[tuple[list[int], list[int]]]:
    """Ports of stubs of the policy's servers and of the reward model's."""
    kind = CompletionsStub if engine == "openai" else Stub
    stub = kind.of(Text(SPRIG_FOLDER / "policy"))
    async with AsyncExitStack() as stack:
        listeners = [listening(stub.answer) for _ in range(REPLICAS + 1)]
        ports = [await stack.enter_async_context(listener) for listener in listeners]
        yield ports[:REPLICAS], ports[REPLICAS:]


@asynccontextmanager
async def _real() -> AsyncIterator[tuple[list[int], list[int]]]:
    """Ports of real servers of the bundled models, on this machine's cores."""
    policies = [policy_server(PYTHON, "lru", KV_TOKENS)]
    rewards = [reward_server(PYTHON, KV_TOKENS)]
    async with started([*policies, *rewards]):
        yield (
            [int(server.url.rpartition(":")[2]) for server in policies],
            [int(server.url.rpartition(":")[2]) for server in rewards],
        )


def wires(
    store: StageHistory, count: int, engine: str = "sglang", *, real: bool = False
) -> list[Asked]:
    """Run ``count`` searches, each over faulty wires and again over sound ones."""

    async def run() -> list[Asked]:
        async with _real() if real else _stubs(engine) as (policies, rewards):
            history = await _faulty(engine, policies, rewards, range(count), store)
        # SGLang's arithmetic depends on the batch, and with it the last digits of a reward
        return [replace(entry, digest="") for entry in history] if real else history

    return store.once(lambda: asyncio.run(run()))


def checked_wires(history: Sequence[Asked], facts: dict[str, Any]) -> dict[str, Any]:
    """Check that every search ends, with the right tree or an error, that nothing is still held,
    and that without faults every search is answered."""
    counts = checked(history)
    peace = history[len(history) // 2 :]
    failed = sum(entry.status >= httpx.codes.INTERNAL_SERVER_ERROR for entry in peace)
    broken = counts["broken"] | facts["held_more"] | {"failed_in_peace": failed}
    return counts | {"toxics": facts["toxics"], "broken": broken}
