"""One server with the bundled models for all clients of a file, and what it says to plain HTTP."""

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
ASKED: Any = [{"role": "user", "content": QUESTIONS[0]}]


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    """Its streams are never silent: every client meets the empty deltas that fill silence."""
    server = Server(keepalive_seconds="0.001")
    yield f"{server.url}/v1"
    server.stop()


@pytest.fixture(scope="module")
def clients() -> Path:
    """Where the clients' commands are that every change is tested by."""
    return clients_bin()


@pytest.fixture(scope="module")
def expected(url: str) -> dict[str, str]:
    """What the server says, by plain HTTP: to a seeded question of 24 tokens, and to a search."""
    with httpx2.Client(base_url=url, timeout=300) as http:
        said = []
        for body in ({"seed": 3, "max_tokens": 24}, {"search": SEARCH}):
            whole = {"model": "sprig", "messages": ASKED} | body
            answer = http.post("/chat/completions", json=whole).raise_for_status().json()
            said.append(answer["choices"][0]["message"]["content"])
        return dict(zip(("plain", "search"), said, strict=True))
