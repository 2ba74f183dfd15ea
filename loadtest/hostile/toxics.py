"""A proxy of one upstream that makes faults on the wire, by Toxiproxy's names for them."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from typing import Self

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[object, object, None]]

READ = 16_384
TOXICS: Sequence[str] = ("latency", "bandwidth", "slicer", "slow_close", "limit_data", "reset_peer")
SILENCE = "timeout"
"""Toxiproxy's name for a wire that falls silent until it closes."""
TOO_MANY = "too_many"
"""An answer becomes a 429, as from a gateway with a rate limit; Toxiproxy has no such fault."""
REFUSAL = (
    b"HTTP/1.1 429 Too Many Requests\r\nretry-after: 1\r\ncontent-length: 0\r\n"
    b"connection: close\r\n\r\n"
)


@dataclass(slots=True)
class Toxic:
    """What happens to one connection's answers.

    ``name``: "latency" (each piece is late), "bandwidth" (few bytes a second), "slicer" (tiny
    pieces), "slow_close", "limit_data" (closes after so many bytes), "reset_peer" (a reset after a
    while), "timeout" (silence, then closes), "too_many" (status 429, then closes). The name decides
    what ``seconds`` and ``size`` mean.
    """

    name: str
    seconds: float
    size: int

    @classmethod
    def at_random(cls, dice: random.Random, names: Sequence[str], silence: float) -> Self:
        """A random toxic of ``names``; silence lasts ``silence`` seconds."""
        name = dice.choice(names)
        seconds = silence if name == SILENCE else dice.uniform(0.001, 0.2)
        return cls(name, seconds, dice.randint(1, 4000))


@dataclass(slots=True)
class Proxy:
    """Forwards connections to a port of this machine; a ``share`` of the answers has a toxic."""

    upstream: int
    share: float = 0.0
    names: Sequence[str] = (*TOXICS, SILENCE)
    silence: float = 3.0
    dice: random.Random = field(default_factory=lambda: random.Random(0))
    done: Counter[str] = field(default_factory=Counter)
    """How often each toxic was applied."""

    async def connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward one connection until it ends."""
        try:
            answers, requests = await asyncio.open_connection("127.0.0.1", self.upstream)
        except OSError:
            writer.transport.abort()
            return
        there = asyncio.create_task(self._plain(reader, requests))
        back = asyncio.create_task(self._answers(answers, writer))
        try:  # once either side has ended, the other is of no use
            await asyncio.wait({there, back}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in (there, back):
                task.cancel()
            for end in (requests, writer):
                end.close()
            await asyncio.gather(there, back, return_exceptions=True)

    async def _plain(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while piece := await reader.read(READ):
                writer.write(piece)
                await writer.drain()

    async def _answers(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward the answers; a connection that gets a toxic at one of them keeps it."""
        toxic: Toxic | None = None
        sent_bytes = 0
        with suppress(ConnectionError):
            while piece := await reader.read(READ):
                if toxic is None and self.dice.random() < self.share:
                    toxic, sent_bytes = Toxic.at_random(self.dice, self.names, self.silence), 0
                    self.done[toxic.name] += 1
                if toxic is None:
                    writer.write(piece)
                    await writer.drain()
                elif not await self._spoilt(toxic, piece, sent_bytes, writer):
                    return
                sent_bytes += len(piece)
            if toxic is not None and toxic.name == "slow_close":
                await asyncio.sleep(toxic.seconds * 10)

    async def _spoilt(
        self, toxic: Toxic, piece: bytes, sent_bytes: int, writer: asyncio.StreamWriter
    ) -> bool:
        """Forward a piece as the toxic has it; False if it was the connection's last."""
        match toxic.name:
            case "latency":
                await asyncio.sleep(toxic.seconds)
            case "bandwidth":
                await asyncio.sleep(len(piece) / (toxic.size * 100))
            case "slicer":
                for at in range(0, len(piece), max(64, toxic.size // 16)):
                    writer.write(piece[at : at + max(64, toxic.size // 16)])
                    await writer.drain()
                    await asyncio.sleep(0.001)
                return True
            case "limit_data":
                writer.write(piece[: max(0, toxic.size - sent_bytes)])
                if sent_bytes + len(piece) >= toxic.size:
                    await writer.drain()
                    return False
                return True
            case "reset_peer":
                await asyncio.sleep(toxic.seconds)
                writer.transport.abort()
                return False
            case "timeout":
                await asyncio.sleep(toxic.seconds)
                return False
            case "too_many" if piece.startswith(b"HTTP/"):
                writer.write(REFUSAL)
                await writer.drain()
                return False
        writer.write(piece)
        await writer.drain()
        return True


@asynccontextmanager
async def listening(handler: Handler, port: int = 0) -> AsyncIterator[int]:
    """Listen on ``port``, or a free one, and yield it; ``handler`` gets every connection. Those
    still open at the end are closed."""
    open_ones: set[asyncio.Task[None]] = set()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.ensure_future(handler(reader, writer))
        open_ones.add(task)
        task.add_done_callback(open_ones.discard)

    server = await asyncio.start_server(accept, "127.0.0.1", port)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in open_ones:
            task.cancel()
        await asyncio.gather(*open_ones, return_exceptions=True)
