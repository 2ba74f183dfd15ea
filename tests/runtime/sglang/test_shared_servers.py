"""Two front ends behind a real nginx share two real SGLang policy replicas, on the CPU.

Each front end has a reward server of its own: one that stands still holds up its searches alone.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import pytest
import pytest_asyncio

from models.bundled import SPRIG_FOLDER
from models.tasks import TASKS
from runtime.sglang.launched_server import LaunchedServer as Sglang
from runtime.sglang.launched_server import LaunchOptions
from runtime.sglang.sglang_metrics import parse_metrics
from tests.deploy.front_ends import (
    LONG,
    SEARCH,
    Nginx,
    Pause,
    callers,
    front_ends,
    outlive,
    until_expanded,
)
from tests.runtime.sglang.support import KV_TOKENS, ON_SERVERS, PYTHON, START_SECONDS, SharedServers
from tests.server.test_process import Server

pytestmark = [*ON_SERVERS, pytest.mark.nightly]

QUESTIONS = TASKS["blocksworld"].questions("dev", 12)


@dataclass(frozen=True, slots=True)
class Pools:
    """The servers, which run. ``rewards``: one for each front end."""

    policies: list[Sglang]
    rewards: list[Sglang]

    def used(self, work: Callable[[], Any]) -> list[Sglang]:
        """The policy servers that draw while ``work`` is done."""
        before = [drawn(server) for server in self.policies]
        work()
        return [one for one, had in zip(self.policies, before, strict=True) if drawn(one) > had]


def server(model: str, *, plugged: bool) -> Sglang:
    """One that is not started yet."""
    return Sglang(
        LaunchOptions(
            model=SPRIG_FOLDER / model,
            python=PYTHON,
            device="cpu",
            memory=0.3,
            kv_tokens=KV_TOKENS,
            args=("--random-seed", "1"),
            seeds=plugged,
            kv_policy="arborkv" if plugged else "lru",
        )
    )


def said(server: Sglang, path: str) -> httpx2.Response:
    """What a server answers to a look at it."""
    return httpx2.get(f"{server.url}{path}", timeout=60, trust_env=False).raise_for_status()


def drawn(server: Sglang) -> int:
    """Tokens that a server has drawn since its start."""
    return parse_metrics(said(server, "/metrics").text).generated


def until_idle(server: Sglang) -> None:
    """Look until a server neither runs a request nor holds one back."""
    while any(
        load["num_running_reqs"] + load["num_waiting_reqs"]
        for load in said(server, "/v1/loads").json()["loads"]
    ):
        pass


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pools(yard: SharedServers) -> AsyncIterator[Pools]:
    """Two servers of each kind; the yard's make room."""
    await yard.rest()
    policies = [server("policy", plugged=True) for _ in range(2)]
    rewards = [server("prm", plugged=False) for _ in range(2)]
    every = [*policies, *rewards]
    try:
        for one in every:
            one.start()
        await asyncio.gather(*(one.ready(START_SECONDS) for one in every))
        yield Pools(policies, rewards)
    finally:
        await asyncio.gather(*(asyncio.to_thread(one.stop) for one in every))


@pytest.fixture
def fronts(pools: Pools) -> Iterator[list[Server]]:
    """Two front ends."""
    policies = ",".join(one.url for one in pools.policies)
    shared = {"engine": "sglang", "policy_urls": policies, "recovery_seconds": "2"}
    own = zip("ab", pools.rewards, strict=True)
    each = (shared | {"front_end": name, "reward_urls": one.url} for name, one in own)
    with front_ends(*each) as running:
        yield running


@pytest.fixture
def nginx(fronts: list[Server], tmp_path: Path) -> Iterator[Nginx]:
    """One before them."""
    with Nginx(tmp_path, fronts) as running:
        yield running


@pytest.fixture
def standing_still(fronts: list[Server], pools: Pools) -> Pause:
    """A front end gets no rewards meanwhile."""

    @contextmanager
    def paused(front: Server) -> Iterator[None]:
        process = pools.rewards[fronts.index(front)].process
        assert process is not None
        os.killpg(process.pid, signal.SIGSTOP)
        try:
            yield
        finally:
            os.killpg(process.pid, signal.SIGCONT)

    return paused


def kill(server: Sglang) -> None:
    """End it without a word."""
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def until_ready(front: Server) -> None:
    """Look until it is."""
    with httpx2.Client(base_url=front.url, timeout=60) as http:
        while not http.get("/ready").is_success:
            pass


def grown(document: dict[str, Any]) -> tuple[Any, ...]:
    """A search's answer and steps: SGLang's arithmetic follows the batch, which follows the clock,
    so that a reward's last digit may turn."""
    steps = [(node["parent"], node["tokens"]) for node in document["tree"]["nodes"]]
    return document["answer"], steps


@pytest.mark.promise("A prompt's searches are on one SGLang server, whichever front end grows them")
def test_a_prompt_has_its_server(nginx: Nginx, fronts: list[Server], pools: Pools) -> None:
    """A search is on one server, and on the same one whichever front end grows it, where it finds
    the prompt that the other's has read; other prompts are on the other server."""
    both, used = callers(nginx, fronts), set()
    found: list[dict[str, Any]] = []

    def ask(question: str, headers: dict[str, str]) -> None:
        search = {"policy": "rebase", "width": 4, "seed": 7}
        found.append(nginx.search({"question": question, "search": search}, headers))

    for question in QUESTIONS:
        (first,), (second,) = (
            pools.used(lambda h=headers, q=question: ask(q, h)) for headers in both
        )
        assert first is second
        here, there = found[-2:]
        assert grown(here) == grown(there)
        assert there["stats"]["engine"]["prefilled_tokens"] <= 1
        used.add(first.url)
        if len(used) == 2:
            break
    assert len(used) == 2

    # Many at once: nothing is read twice, so none has moved.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, QUESTIONS, both * (len(QUESTIONS) // 2)))
    for document in found:
        assert document["stats"]["finished"] == 4
        cost = document["stats"]["engine"]
        assert cost["prefilled_tokens"] <= document["stats"]["prompt_tokens"]
        assert (cost["rehydrated_tokens"], cost["cached_tokens"] > 0) == (0, True)
    assert not any("HTTP Request" in line for front in fronts for line in front.log)


def test_a_front_end_dies(
    nginx: Nginx, fronts: list[Server], pools: Pools, standing_still: Pause
) -> None:
    """Its streams break off, and nothing else: what it had not begun to answer the other one
    answers, with the same steps, though the rewards of both were long in coming."""
    streamed, asked = outlive(nginx, fronts, standing_still)
    assert grown(asked) == grown(streamed)
    for policy in pools.policies:
        until_idle(policy)


def test_a_policy_replica_dies(
    nginx: Nginx, fronts: list[Server], pools: Pools, standing_still: Pause
) -> None:
    """Searches that were on it go on at the other one, with the same steps, and both front ends
    serve whoever comes."""
    mine, other = callers(nginx, fronts)
    whole = nginx.search(LONG, mine)
    with nginx.stream(LONG, mine) as stream:
        lines = stream.iter_lines()
        (lost,) = pools.used(lambda: until_expanded(lines))
        with standing_still(fronts[0]):
            kill(lost)
        rest = [line for line in lines if line]
    assert "event: error" not in rest
    done = json.loads(rest[-1].removeprefix("data: "))
    assert done["stats"]["finished"] == 32
    moved = nginx.http.get(f"{SEARCH}/{done['id']}", headers=mine).raise_for_status().json()
    assert grown(moved) == grown(whole) == grown(nginx.search(LONG, other))
    (left,) = (one for one in pools.policies if one is not lost)
    until_idle(left)
    for front in fronts:
        until_ready(front)

    # The last server of a kind: its searches cannot go on, and say so before they break off.
    said: list[str] = []
    with nginx.stream(LONG, mine) as stream:
        lines = stream.iter_lines()
        until_expanded(lines)
        kill(pools.rewards[0])
        with pytest.raises(httpx2.RemoteProtocolError):
            said.extend(lines)
    ended = json.loads(said[said.index("event: error") + 1].removeprefix("data: "))
    assert ended["error"]["code"] == "engine_unavailable"
