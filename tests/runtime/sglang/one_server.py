"""A SGLang server of a test's own words: what each request gets before its connection ends."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

from loadtest.hostile.toxics import listening
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.replica import Replica
from tests.closing import closing

Heard = list[tuple[str, dict[str, Any]]]
"""What came in: paths and bodies."""


@asynccontextmanager
async def answering(
    answer: Callable[[int], bytes | None], probe: float = 5
) -> AsyncIterator[tuple[Replica, Heard]]:
    """``answer``: what the n-th request gets, from 1; None: nothing ever."""
    heard: Heard = []

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].split()[0])
            heard.append((head.split()[1], json.loads(await reader.readexactly(size))))
            said = answer(len(heard))
            if said is None:
                await reader.read()
            else:
                writer.write(said)
                await writer.drain()
        finally:
            writer.close()

    async with listening(one) as port:
        url = f"http://127.0.0.1:{port}"
        async with closing(
            Replica(url, ServerTimes(connect=5, answer=600, probe=probe, stall=30))
        ) as replica:
            yield replica, heard
