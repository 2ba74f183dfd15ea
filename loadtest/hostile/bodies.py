"""Malformed bodies: cut, altered and random ones, over raw sockets and in every field."""

from __future__ import annotations

import asyncio
import json
import random
import re
from collections.abc import Sequence
from typing import Any

from loadtest.hostile.history import HUNG, Asked, StageHistory, checked
from loadtest.hostile.rest import counts_at_rest, more
from loadtest.searches import side_by_side
from loadtest.served import Served

PATIENCE = 30.0
AT_ONCE = 16
GOOD: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {
        "model": "sprig",
        "messages": [{"role": "user", "content": "17 + 25"}],
        "max_tokens": 8,
        "n": 1,
        "temperature": 1.0,
        "top_p": 1.0,
        "stop": ["x"],
        "seed": 1,
        "stream": False,
        "search": {"policy": "rebase", "width": 2, "max_depth": 2, "deadline_ms": 2000},
    },
    "/v1/completions": {"model": "sprig", "prompt": "17 + 25", "max_tokens": 8, "stop": "x"},
    "/v1/search": {
        "question": "17 + 25",
        "search": {"policy": "ets", "width": 2, "max_depth": 2, "deadline_ms": 2000, "seed": 1},
        "background": False,
        "dry_run": False,
    },
}
ODD: Sequence[str] = (
    *("null", "true", "-1", "0", "1e308", "-1e308", "NaN", "Infinity", "1" + "0" * 400),
    *(str(2**63), str(-(2**63) - 1), "0.5", '""', '"\\ud800"', '"\\u0000"', '"5"', "[]", "{}"),
    *("[" * 200 + "]" * 200, '["\\ud800"]', '{"\\ud800":1}', '"' + "x" * 5000 + '"', "[[1]]"),
    *('"<|end|><|assistant|>"', "[null]", '[{"role":"user"}]', '[{"role":"user","content":7}]'),
)


def body(number: int) -> bytes:
    """The bytes of request ``number`` as a connection sends them, head included."""
    dice = random.Random(number)
    path = dice.choice(sorted(GOOD))
    text = json.dumps(GOOD[path])
    for _ in range(dice.choice((1, 1, 1, 2, 3))):
        text = _bent(text, dice)
    content = text.encode(errors="replace")
    if dice.random() < 0.1:
        content = bytes(dice.randrange(256) for _ in range(dice.randrange(200)))
    kind = dice.choice(("application/json",) * 9 + ("text/plain",))
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: {kind}\r\nconnection: close\r\n"
    size = f"content-length: {len(content)}\r\n\r\n"
    if dice.random() < 0.1:
        return _bent_head(head, size, content, dice)
    return (head + size).encode() + content


def _bent(text: str, dice: random.Random) -> str:
    """The text with one odd value, with one more field, or cut off."""
    values = list(re.finditer(r': ("[^"]*"|[-\w.]+|\[[^\[\]]*\]|\{[^{}]*\})', text))
    roll = dice.random()
    if roll < 0.75 and values:
        place = dice.choice(values)
        return text[: place.start(1)] + dice.choice(ODD) + text[place.end(1) :]
    if roll < 0.9:
        return text.replace("{", '{"' + dice.choice(("min_p", "a", "stop", "n")) + '": 3, ', 1)
    return text[: dice.randrange(len(text) + 1)]


def _bent_head(head: str, size: str, content: bytes, dice: random.Random) -> bytes:
    bends = (
        (head.replace("HTTP/1.1", "HTTP/9.9") + size).encode() + content,
        (head + "transfer-encoding: chunked\r\n" + size).encode() + content,
        (head + "content-length: 5\r\n\r\n").encode() + content,
        (head + "content-length: -5\r\n\r\n").encode() + content,
        (head + "a: " + "x" * 70_000 + "\r\n" + size).encode() + content,
        (head.replace("\r\n", "\n") + size).encode() + content,
        b"\x00\x16\x03\x01" + content,
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    )
    return dice.choice(bends)


async def send(
    port: int, name: str, request: bytes, patience: float = PATIENCE, **how: Any
) -> Asked:
    """Send bytes on a new connection and wait for its end, at most ``patience`` seconds;
    ``how``: arguments of ``asyncio.open_connection``."""
    try:
        async with asyncio.timeout(patience):
            reader, writer = await asyncio.open_connection("127.0.0.1", port, **how)
            try:
                writer.write(request)
                answer = await reader.read()
            except ConnectionError:
                answer = b""
            finally:
                writer.close()
    except TimeoutError:
        return Asked(name, HUNG)
    match = re.match(rb"HTTP/1\.\d (\d+)", answer)
    status = int(match[1]) if match else 0
    error = re.search(rb'"code": ?"(\w+)"', answer)
    by_http = b"Invalid HTTP request" in answer  # uvicorn's own words, before any request
    return Asked(name, status, "no_http" if by_http else (error[1].decode() if error else ""))


def bad_bodies(store: StageHistory, count: int, chunk: int = 500) -> list[Asked]:
    """Send ``count`` malformed bodies, 16 at once; note how many engines died, and memory."""
    history = store.read()
    if len(history) >= count:
        return history
    with Served(body_idle_seconds=2.0) as served:
        asyncio.run(_some(served.url, range(-chunk, 0)))  # warms up
        base = asyncio.run(counts_at_rest(served))
        engine = served.engine
        for begin in range(len(history), count, chunk):
            batch = asyncio.run(_some(served.url, range(begin, min(begin + chunk, count))))
            history += batch
            store.add(batch)
            now, facts = asyncio.run(counts_at_rest(served, base)), store.facts
            store.note(
                engine_deaths=facts.get("engine_deaths", 0) + int(served.engine != engine),
                held_more=more(now, base),
                mb=[facts.get("mb", [base["mb"]])[0], now["mb"]],
            )
            engine = served.engine
    return history


async def _some(url: str, numbers: range) -> list[Asked]:
    port = int(url.rpartition(":")[2])
    return await side_by_side(lambda n: send(port, f"body {n}", body(n)), numbers, AT_ONCE)


def checked_bodies(history: Sequence[Asked], facts: dict[str, Any]) -> dict[str, Any]:
    """Check that every request ended, none by the server's fault, and nothing is still held."""
    counts = checked(history, answers=False)
    broken = {"engine_deaths": facts["engine_deaths"], **facts["held_more"]}
    return counts | {"mb": facts["mb"], "broken": counts["broken"] | broken}
