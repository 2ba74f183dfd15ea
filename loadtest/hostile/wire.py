"""Faults on the wires between a server and stubs of SGLang or of vLLM, which run its models."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence
from contextlib import AsyncExitStack
from typing import Any

import httpx

from loadtest.hostile.completions_stub import CompletionsStub
from loadtest.hostile.history import Asked, StageHistory, checked
from loadtest.hostile.rest import held, more
from loadtest.hostile.searches import in_company
from loadtest.hostile.sglang_stub import Stub
from loadtest.hostile.toxics import Proxy, listening
from loadtest.served import Served
from models.bundled import SPRIG_FOLDER
from runtime.text import Text

AT_ONCE = 8
REPLICAS = 2
SHARE = 0.1
"""Of the answers on a wire, that have a fault."""
STALL_SECONDS = 2.0
SILENCE = 4.0
"""Longer than a server waits that counts one as lost which stands still."""


async def _faulty(engine: str, numbers: Sequence[int], kept: StageHistory) -> list[Asked]:
    """Searches over wires that fail to stubs of an engine's servers, then again over whole ones."""
    kind = CompletionsStub if engine == "openai" else Stub
    stub = kind.of(Text(SPRIG_FOLDER / "policy"))
    async with AsyncExitStack() as stack:
        servers = [listening(stub.answer) for _ in range(REPLICAS + 1)]
        wires = [
            Proxy(await stack.enter_async_context(server), silence=SILENCE) for server in servers
        ]
        ports = [await stack.enter_async_context(listening(wire.connection)) for wire in wires]
        urls = [f"http://127.0.0.1:{port}" for port in ports]
        served = await asyncio.to_thread(
            Served,
            engine=engine,
            policy_urls=",".join(urls[:REPLICAS]),
            reward_urls=urls[REPLICAS],
            stall_seconds=STALL_SECONDS,
        )
        try:
            base = await held(served)
            for wire in wires:
                wire.share = SHARE
            found = await in_company(served.url, numbers, AT_ONCE)
            for wire in wires:
                wire.share = 0.0
            again = await in_company(served.url, numbers, AT_ONCE)
            now = await held(served, base)
        finally:
            await asyncio.to_thread(served.stop)
        toxics = sum((wire.done for wire in wires), start=Counter())
        kept.note(toxics=dict(toxics), held_more=more(now, base))
    return found + again


def wires(kept: StageHistory, count: int, engine: str = "sglang") -> list[Asked]:
    """So many searches, each over faults and again in peace."""
    return kept.once(lambda: asyncio.run(_faulty(engine, range(count), kept)))


def checked_wires(history: Sequence[Asked], facts: dict[str, Any]) -> dict[str, Any]:
    """Every search has its end, the right one or an error, nothing stays, and in peace all is
    answered."""
    found = checked(history)
    peace = history[len(history) // 2 :]
    failed = sum(one.status >= httpx.codes.INTERNAL_SERVER_ERROR for one in peace)
    broken = found["broken"] | facts["held_more"] | {"failed_in_peace": failed}
    return found | {"toxics": facts["toxics"], "broken": broken}
