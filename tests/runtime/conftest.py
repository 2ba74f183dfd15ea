"""One set of SGLang servers for the whole run: they take long to start."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest_asyncio

from tests.runtime.sglang.support import SharedServers


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def yard() -> AsyncIterator[SharedServers]:
    """Servers that start when first asked for. The launched ones end with the engine."""
    servers = SharedServers()
    yield servers
    assert await servers.close() == [], "processes that outlive the engine they were launched for"
