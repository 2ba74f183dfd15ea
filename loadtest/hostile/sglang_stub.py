"""SGLang as the server sees it, drawing by hash: as quick as the wire, the same after any fault."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
from collections.abc import Sequence
from typing import Any

INFO = {
    "internal_states": [{"effective_max_running_requests_per_dp": 64}],
    "max_total_num_tokens": 65_536,
    "context_length": 1024,
    "disable_cuda_graph": True,
}
ENDS = 0.02
"""How likely a token is the last one of all."""
DELIMITS = 0.1
"""How likely a token ends a step."""


class Stub:
    """Answers ``/generate`` of one model: tokens follow from those before and from the seed."""

    def __init__(self, pieces: Sequence[bytes], words: Sequence[int], end: int) -> None:
        """``pieces``: every id's bytes; ``words``: the ids to draw; ``end``: the text's last."""
        self._pieces = pieces
        self._words = words
        self._end = end

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """One connection."""
        try:
            while head := await reader.readline():
                path, size = head.split()[1].decode(), 0
                while (line := await reader.readline()).strip():
                    name, _, value = line.decode().lower().partition(":")
                    size = int(value) if name == "content-length" else size
                body = await reader.readexactly(size)
                said = json.dumps(self._said(path, body)).encode()
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(said) + said)
                await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError):
            pass  # whoever asked has gone
        finally:
            writer.close()

    def _said(self, path: str, body: bytes) -> dict[str, Any]:
        match path:
            case "/generate":
                return self._generated(json.loads(body))
            case "/server_info":
                return INFO
            case _:
                return {}

    def _generated(self, asked: dict[str, Any]) -> dict[str, Any]:
        ids, wanted = list(asked["input_ids"]), asked["sampling_params"]
        drawn: list[int] = []
        delimiters = [self._pieces.index(stop.encode()) for stop in wanted.get("stop", ())]
        stops = {self._end, *delimiters}
        while len(drawn) < wanted["max_new_tokens"] and not stops & set(drawn[-1:]):
            roll = share([wanted["sampling_seed"], *ids, *drawn])
            drawn.append(self._token(roll, delimiters))
        logprob = math.log(0.5)
        meta: dict[str, Any] = {
            "prompt_tokens": len(ids),
            "cached_tokens": 0,
            "finish_reason": {"type": "stop" if stops & set(drawn[-1:]) else "length"},
            "output_token_logprobs": [[logprob, token, None] for token in drawn],
            "output_top_logprobs": [[[logprob, token, None]] for token in drawn],
            "input_token_logprobs": [
                [-1.0 - share(ids[: at + 1]), token, None] for at, token in enumerate(ids)
            ],
        }
        if verdicts := asked.get("token_ids_logprob"):
            good = min(max(share(ids), 1e-6), 1 - 1e-6)
            logprobs = [math.log(good), math.log(1 - good)]
            meta["output_token_ids_logprobs"] = [
                [[p, token, None] for p, token in zip(logprobs, verdicts, strict=True)]
            ]
        return {"text": "", "output_ids": drawn, "meta_info": meta}

    def _token(self, roll: float, delimiters: Sequence[int]) -> int:
        if roll < ENDS:
            return self._end
        if delimiters and roll < ENDS + DELIMITS:
            return delimiters[0]
        return self._words[int(roll * 1e6) % len(self._words)]


def share(ids: Sequence[int]) -> float:
    """In [0, 1), by these ids."""
    digest = hashlib.blake2b(repr(ids).encode(), digest_size=7).digest()
    return int.from_bytes(digest, "big") / 2**56
