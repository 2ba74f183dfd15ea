"""One server with the bundled models for all clients of a file, and its replies to plain HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import pytest

from models.tasks import TASKS
from tests.clients.environment import clients_bin
from tests.server.test_process import Server

QUESTIONS = TASKS["game24"].questions("dev", 10)
SEARCH = {"policy": "rebase", "width": 2, "seed": 11}
MESSAGES: Any = [{"role": "user", "content": QUESTIONS[0]}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """The server's URL; its streams fill silence with empty deltas, so every client meets them."""
    server = Server(keepalive_seconds="0.001")
    yield f"{server.url}/v1"
    server.stop()


@pytest.fixture(scope="module")
def clients() -> Path:
    """The folder with the commands of the clients that every change is tested with."""
    return clients_bin()


@pytest.fixture(scope="module")
def expected(url: str) -> dict[str, str]:
    """The server's replies by plain HTTP: to a seeded chat of 24 tokens, and to a search."""
    with httpx2.Client(base_url=url, timeout=300) as http:
        replies = []
        for body in ({"seed": 3, "max_tokens": 24}, {"search": SEARCH}):
            request = {"model": "sprig", "messages": MESSAGES} | body
            answer = http.post("/chat/completions", json=request).raise_for_status().json()
            replies.append(answer["choices"][0]["message"]["content"])
        return dict(zip(("plain", "search"), replies, strict=True))
