"""One set of SGLang servers for the whole run: they take long to start."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.runtime.sglang.support import SharedServers


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def yard() -> AsyncIterator[SharedServers]:
    """Servers that start when they are first asked for. What ``--launch`` started ends with it."""
    made = SharedServers()
    yield made
    assert await made.close() == [], "processes that outlive the engine they were launched for"
