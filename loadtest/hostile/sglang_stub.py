"""A stub of SGLang that draws by hash: it answers at once, and the same after any fault.

It can be killed, fall silent, and fail requests.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, Self

from loadtest.hostile.toxics import listening
from runtime.text import Text

INFO = {
    "internal_states": [{"effective_max_running_requests_per_dp": 64}],
    "max_total_num_tokens": 65_536,
    "context_length": 1024,
    "disable_cuda_graph": True,
}
ENDS = 0.02
"""The probability that a token ends the text."""
DELIMITS = 0.1
"""The probability that a token ends a step."""
WORDS = "0123456789 +-*/()="


class Stub:
    """Answers ``/generate`` of one model: tokens follow from those before and from the seed."""

    work = "/generate"
    """The path of requests for work."""

    def __init__(self, pieces: Sequence[bytes], words: Sequence[int], end: int) -> None:
        """``pieces``: every id's bytes; ``words``: the ids to draw; ``end``: the text's last."""
        self._pieces = pieces
        self._words = words
        self._end = end

    @classmethod
    def of(cls, text: Text) -> Self:
        """A stub that draws digits and signs."""
        words = [text.encode(word)[0] for word in WORDS]
        return cls(text.pieces, words, min(text.eos))

    async def answer(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        meddle: Callable[[str], Awaitable[int]] | None = None,
    ) -> None:
        """Serve one connection; ``meddle`` gets each request's path and returns the status."""
        try:
            while head := await reader.readline():
                path, size = head.split()[1].decode(), 0
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode().lower().partition(":")
                    size = int(value) if name == "content-length" else size
                body = await reader.readexactly(size)
                status = 200 if meddle is None else await meddle(path)
                pieces = self._said(path, body) if status == 200 else []
                size = sum(map(len, pieces))
                writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, size))
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # the client has gone
        finally:
            writer.close()

    def _said(self, path: str, body: bytes) -> list[bytes]:
        """The answer's pieces: one event for each item if a list is streamed, else a single one."""
        match path:
            case "/generate":
                request = json.loads(body)
                if not request.get("stream"):
                    return [json.dumps(self._generated(request)).encode()]
                answers = [
                    self._generated(item) | {"index": at} for at, item in enumerate(items(request))
                ]
                events = [*map(json.dumps, answers), "[DONE]"]
                return [f"data: {event}\n\n".encode() for event in events]
            case "/server_info" | "/get_server_info":
                return [json.dumps(INFO).encode()]
            case _:
                return [b"{}"]

    def draw(
        self, ids: Sequence[int], seed: int, most: int, stop: Sequence[str]
    ) -> tuple[list[int], bool]:
        """At most ``most`` tokens after ``ids``, and whether the last of them is a stop."""
        tokens: list[int] = []
        delimiters = [self._pieces.index(text.encode()) for text in stop]
        stops = {self._end, *delimiters}
        while len(tokens) < most and not stops & set(tokens[-1:]):
            tokens.append(self._token(share([seed, *ids, *tokens]), delimiters))
        return tokens, bool(stops & set(tokens[-1:]))

    def _generated(self, request: dict[str, Any]) -> dict[str, Any]:
        ids, params = list(request["input_ids"]), request["sampling_params"]
        seed = params.get("sampling_seed", 0) % (1 << 64)
        tokens, stopped = self.draw(ids, seed, params["max_new_tokens"], params.get("stop", ()))
        logprob = math.log(0.5)
        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "cached_tokens": 0,
            "finish_reason": {"type": "stop" if stopped else "length"},
            "output_token_logprobs": [[logprob, token, None] for token in tokens],
            "output_top_logprobs": [[[logprob, token, None]] for token in tokens],
            "input_token_logprobs": [
                [-1.0 - share(ids[: at + 1]), token, None] for at, token in enumerate(ids)
            ],
        }
        if verdicts := request.get("token_ids_logprob"):
            good = min(max(share(ids), 1e-6), 1 - 1e-6)
            logprobs = [math.log(good), math.log(1 - good)]
            meta["output_token_ids_logprobs"] = [
                [[p, token, None] for p, token in zip(logprobs, verdicts, strict=True)]
            ]
        return {"text": "", "output_ids": tokens, "meta_info": meta}

    def _token(self, roll: float, delimiters: Sequence[int]) -> int:
        if roll < ENDS:
            return self._end
        if delimiters and roll < ENDS + DELIMITS:
            return delimiters[0]
        return self._words[int(roll * 1e6) % len(self._words)]


def items(request: dict[str, Any]) -> list[dict[str, Any]]:
    """The items of a list request, each as a request of its own."""
    lists = {name: value for name, value in request.items() if isinstance(value, list)}
    several = [
        dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)
    ]
    return [request | item for item in several]


class MortalStub:
    """A stub that keeps its port when it starts again. ``still``: it is reachable but silent;
    ``faults``: how many of the next requests for work get status 500; ``unanswered``: how many of
    them get no answer."""

    def __init__(self, stub: Stub) -> None:
        self.still = False
        self.faults = self.unanswered = 0
        self.asked = 0
        """Requests for work so far."""
        self.port = 0
        self._stub = stub
        self._ends = AsyncExitStack()

    @property
    def url(self) -> str:
        """The server's URL."""
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> None:
        """Listen, on the same port as before."""
        server = listening(self._connection, self.port)
        self.port = await self._ends.enter_async_context(server)

    async def kill(self) -> None:
        """Close the port and all connections."""
        await self._ends.aclose()

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._stub.answer(reader, writer, self._meddle)
        except asyncio.CancelledError:
            writer.transport.abort()
            raise

    async def _meddle(self, path: str) -> int:
        """Wait while the stub is still; the status of the answer."""
        work = path == self._stub.work
        self.asked += work
        while self.still:
            await asyncio.sleep(0.01)
        if work and self.unanswered:
            self.unanswered -= 1
            await asyncio.Event().wait()
        if not work or not self.faults:
            return 200
        self.faults -= 1
        return 500


def share(ids: Sequence[int]) -> float:
    """A number in [0, 1), by a hash of ``ids``."""
    digest = hashlib.blake2b(repr(ids).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56
