"""A SGLang server that gives scripted answers and closes each connection."""

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

Requests = list[tuple[str, dict[str, Any]]]
"""Received requests: path and body of each."""


@asynccontextmanager
async def answering(
    answer: Callable[[int], bytes | None], probe: float = 5
) -> AsyncIterator[tuple[Replica, Requests]]:
    """``answer``: the n-th request's response, from 1; for None the request is never answered."""
    requests: Requests = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
            size = int(head.partition("content-length:")[2].split()[0])
            requests.append((head.split()[1], json.loads(await reader.readexactly(size))))
            reply = answer(len(requests))
            if reply is None:
                await reader.read()
            else:
                writer.write(reply)
                await writer.drain()
        finally:
            writer.close()

    async with listening(serve) as port:
        url = f"http://127.0.0.1:{port}"
        async with closing(
            Replica(url, ServerTimes(connect=5, answer=600, probe=probe, stall=30))
        ) as replica:
            yield replica, requests
