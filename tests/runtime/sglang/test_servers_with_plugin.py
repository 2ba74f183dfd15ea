"""The plug-in at work in the real SGLang, on the CPU."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
import pytest_asyncio

from hedgerow_sglang.plugin_protocol import Note, custom_params, plugin_counts
from loadtest.on_sglang import forget
from runtime.sglang.launched_server import STUBS
from tests.runtime.sglang.support import KV_TOKENS, ON_SERVERS, PYTHON, ROOT, SharedServers

pytestmark = ON_SERVERS

PROMPT = list(range(20, 120))
STEP = 800
IN_YARD = pytest.mark.asyncio(loop_scope="session")
"""The event loop of the shared servers' fixture."""


def test_its_decisions_are_kvpolicys_exact_modes() -> None:
    """Run ``random_trees`` in SGLang's environment: its checks hold on SGLang's own radix cache for
    40 seeds."""
    paths = os.pathsep.join(map(str, (STUBS, ROOT)))
    counts = subprocess.check_output(
        [str(PYTHON), "-m", "tests.hedgerow_sglang.random_trees", "40"],
        env=os.environ | {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1"},
        cwd=ROOT,
        text=True,
    )
    counts = json.loads(counts.splitlines()[-1])
    assert counts["compared"] >= 100
    assert all(counts.values())


class Client:
    """A client that sends a search's requests to a server."""

    def __init__(self, url: str) -> None:
        self.http = httpx.AsyncClient(base_url=url, timeout=300, trust_env=False)

    async def send(self, tokens: list[int], note: Note | None, draw: int = 0) -> httpx.Response:
        """Send a request for ``draw`` tokens after ``tokens``."""
        extra = {} if note is None else {"custom_params": custom_params(note)}
        body = {"input_ids": tokens, "sampling_params": {"max_new_tokens": draw, **extra}}
        return await self.http.post("/generate", json=body)

    async def read(self, tokens: list[int], note: Note | None = None) -> int:
        """Read a path; returns how many of its tokens were cached."""
        answer = (await self.send(tokens, note)).raise_for_status().json()
        return answer["meta_info"]["cached_tokens"]

    async def plugin_counts(self) -> dict[str, int] | None:
        """The plug-in's counts."""
        return plugin_counts((await self.http.get("/server_info")).json())


@pytest_asyncio.fixture(loop_scope="session")
async def plugged(yard: SharedServers) -> AsyncIterator[Client]:
    """A client of a server with the plug-in and an empty cache."""
    (server,) = await yard.have("policy")
    client = Client(server.url)
    await forget([server])
    yield client
    await client.http.aclose()


def note(tree: str, node: int, parent: int, turn: int, **fields: Any) -> Note:
    """A step's note with PROMPT's length."""
    return Note(tree, len(PROMPT), node, parent, turn, **fields)


@IN_YARD
async def test_a_pruned_subtree_goes_at_once(plugged: Client) -> None:
    """Of steps 1, 3 below it, and 2, a note that 1 and 3 are dead frees their tokens at once."""
    before = await plugged.plugin_counts()
    assert before is not None
    paths = {n: PROMPT + [200 + n] * 50 for n in (1, 2)}
    paths[3] = paths[1] + [203] * 50
    for node, parent in ((1, 0), (2, 0), (3, 1)):
        await plugged.read(paths[node], note("ash", node, parent, turn=1))
    during = await plugged.plugin_counts()
    assert during is not None
    assert (during["searches"] - before["searches"], during["held_tokens"]) == (1, 250)
    await plugged.read(PROMPT, Note("ash", len(PROMPT), turn=2, dead=(1, 3)))
    after = await plugged.plugin_counts()
    assert after is not None
    assert after["freed_tokens"] - before["freed_tokens"] == 100
    assert after["held_tokens"] == 150
    assert await plugged.read(paths[2]) == 149
    assert await plugged.read(paths[3]) == 100
    await plugged.read(PROMPT, Note("ash", len(PROMPT), over=("ash",)))
    over = await plugged.plugin_counts()
    assert over is not None
    assert (over["searches"] - before["searches"], over["held_tokens"]) == (0, 0)


@IN_YARD
async def test_a_trimmed_leaf_keeps_its_prefix(plugged: Client) -> None:
    """The pool has 700 tokens free beside a prompt of 100 and 24 steps of 800; an unrelated request
    needs 900: only the least valuable step loses its tail, and those tokens count as recomputed
    when it is read again."""
    before = await plugged.plugin_counts()
    assert before is not None
    steps = {node: PROMPT + [200 + node] * STEP for node in range(1, 25)}
    assert KV_TOKENS - len(PROMPT) - len(steps) * STEP == 700
    for node, path in steps.items():
        await plugged.read(path, note("oak", node, 0, turn=1))
    values = {node: 0.1 if node == 1 else 0.9 for node in steps}
    await plugged.read(PROMPT, Note("oak", len(PROMPT), turn=2, values=values, active=(0,)))
    await plugged.read([300] * 900)
    trimmed = await plugged.plugin_counts()
    assert trimmed is not None
    evicted = trimmed["evicted_tokens"] - before["evicted_tokens"]
    lost = trimmed["split_evicted_tokens"] - before["split_evicted_tokens"]
    assert 200 <= lost < 200 + 120
    assert 0 <= evicted - lost < len(PROMPT)  # unheld tokens go first
    assert await plugged.read(steps[2], note("oak", 30, 2, turn=3)) == 899
    cached = await plugged.read([*steps[1], 7], note("oak", 31, 1, turn=3))
    assert cached - (900 - lost) in (0, 1)  # 1: a health check's token was cut off, too
    again = await plugged.plugin_counts()
    assert again is not None
    assert again["recomputed_tokens"] - before["recomputed_tokens"] == 900 - cached - 1
    await plugged.read(PROMPT, Note("oak", len(PROMPT), over=("oak",)))


@IN_YARD
async def test_a_wrong_note_is_the_clients_error(plugged: Client) -> None:
    """A wrong note gets status 400 and never reaches the scheduler."""
    body = {"input_ids": PROMPT, "sampling_params": {"custom_params": {"hedgerow": '{"tree": 3}'}}}
    refused = await plugged.http.post("/generate", json=body)
    assert refused.status_code == 400
    assert "tree: 3; the name of a search is needed" in refused.text
    await plugged.read(PROMPT)
