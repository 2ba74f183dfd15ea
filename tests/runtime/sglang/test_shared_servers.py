"""Two front ends behind a real nginx share two real SGLang policy replicas, on the CPU.

Each front end has a reward server of its own, so a frozen one holds up only its own searches.
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
    """The running servers. ``rewards``: one for each front end."""

    policies: list[Sglang]
    rewards: list[Sglang]

    def used(self, work: Callable[[], Any]) -> list[Sglang]:
        """The policy servers that draw tokens while ``work`` runs."""
        before = [tokens_of(server) for server in self.policies]
        work()
        return [p for p, n in zip(self.policies, before, strict=True) if tokens_of(p) > n]


def server(model: str, *, plugged: bool) -> Sglang:
    """A server that is not started yet; ``plugged``: with our plug-in's cache and seeds."""
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


def get_page(server: Sglang, path: str) -> httpx2.Response:
    """The response to a GET at ``path``. Raises HTTPStatusError."""
    return httpx2.get(f"{server.url}{path}", timeout=60, trust_env=False).raise_for_status()


def tokens_of(server: Sglang) -> int:
    """The number of tokens that a server has drawn since its start."""
    return parse_metrics(get_page(server, "/metrics").text).generated


def until_idle(server: Sglang) -> None:
    """Poll until a server neither runs nor queues a request."""
    while any(
        load["num_running_reqs"] + load["num_waiting_reqs"]
        for load in get_page(server, "/v1/loads").json()["loads"]
    ):
        pass


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def pools(yard: SharedServers) -> AsyncIterator[Pools]:
    """Two servers of each kind; the shared ones are stopped to make room."""
    await yard.rest()
    policies = [server("policy", plugged=True) for _ in range(2)]
    rewards = [server("prm", plugged=False) for _ in range(2)]
    every = [*policies, *rewards]
    try:
        for sglang in every:
            sglang.start()
        await asyncio.gather(*(sglang.ready(START_SECONDS) for sglang in every))
        yield Pools(policies, rewards)
    finally:
        await asyncio.gather(*(asyncio.to_thread(sglang.stop) for sglang in every))


@pytest.fixture
def fronts(pools: Pools) -> Iterator[list[Server]]:
    """Two front ends over both policy servers, each with its own reward server."""
    policies = ",".join(policy.url for policy in pools.policies)
    shared = {"engine": "sglang", "policy_urls": policies, "recovery_seconds": "2"}
    pairs = zip("ab", pools.rewards, strict=True)
    each = (shared | {"front_end": name, "reward_urls": reward.url} for name, reward in pairs)
    with front_ends(*each) as running:
        yield running


@pytest.fixture
def nginx(fronts: list[Server], tmp_path: Path) -> Iterator[Nginx]:
    """An nginx before both front ends."""
    with Nginx(tmp_path, fronts) as running:
        yield running


@pytest.fixture
def standing_still(fronts: list[Server], pools: Pools) -> Pause:
    """A context in which a front end's reward server is frozen."""

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
    """Kill the server's process group and wait for it."""
    assert server.process is not None
    os.killpg(server.process.pid, signal.SIGKILL)
    server.process.wait()


def until_ready(front: Server) -> None:
    """Poll until the front end is ready."""
    with httpx2.Client(base_url=front.url, timeout=60) as http:
        while not http.get("/ready").is_success:
            pass


def tree_of(document: dict[str, Any]) -> tuple[Any, ...]:
    """A search's answer and steps, without rewards: SGLang's arithmetic depends on the batch, which
    depends on timing, so a reward's last digit may differ."""
    steps = [(node["parent"], node["tokens"]) for node in document["tree"]["nodes"]]
    return document["answer"], steps


@pytest.mark.promise(
    "All searches of a prompt run on one SGLang server, whichever front end grows them."
)
def test_a_prompt_has_its_server(nginx: Nginx, fronts: list[Server], pools: Pools) -> None:
    """A prompt's searches run on one server, whichever front end grows them, so the second finds
    the prompt cached; some other prompt runs on the other server."""
    both, used = callers(nginx, fronts), set()
    documents: list[dict[str, Any]] = []

    def ask(question: str, headers: dict[str, str]) -> None:
        search = {"policy": "rebase", "width": 4, "seed": 7}
        documents.append(nginx.search({"question": question, "search": search}, headers))

    for question in QUESTIONS:
        (first,), (second,) = (
            pools.used(lambda h=headers, q=question: ask(q, h)) for headers in both
        )
        assert first is second
        here, there = documents[-2:]
        assert tree_of(here) == tree_of(there)
        assert there["stats"]["engine"]["prefilled_tokens"] <= 1
        used.add(first.url)
        if len(used) == 2:
            break
    assert len(used) == 2

    # With many at once nothing is read twice, so no search has moved.
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, QUESTIONS, both * (len(QUESTIONS) // 2)))
    for document in documents:
        assert document["stats"]["finished"] == 4
        cost = document["stats"]["engine"]
        assert cost["prefilled_tokens"] <= document["stats"]["prompt_tokens"]
        assert (cost["rehydrated_tokens"], cost["cached_tokens"] > 0) == (0, True)
    assert not any("HTTP Request" in line for front in fronts for line in front.log)


def test_a_front_end_dies(
    nginx: Nginx, fronts: list[Server], pools: Pools, standing_still: Pause
) -> None:
    """Only its streams break; the other front end answers unbegun requests with the same steps."""
    streamed, plain = outlive(nginx, fronts, standing_still)
    assert tree_of(plain) == tree_of(streamed)
    for policy in pools.policies:
        until_idle(policy)


def test_a_policy_replica_dies(
    nginx: Nginx, fronts: list[Server], pools: Pools, standing_still: Pause
) -> None:
    """Its searches go on at the other replica with the same steps, and both front ends stay
    ready."""
    mine, theirs = callers(nginx, fronts)
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
    assert tree_of(moved) == tree_of(whole) == tree_of(nginx.search(LONG, theirs))
    (survivor,) = (policy for policy in pools.policies if policy is not lost)
    until_idle(survivor)
    for front in fronts:
        until_ready(front)

    # Without the last server of a kind its searches send an error before they break off.
    events: list[str] = []
    with nginx.stream(LONG, mine) as stream:
        lines = stream.iter_lines()
        until_expanded(lines)
        kill(pools.rewards[0])
        with pytest.raises(httpx2.RemoteProtocolError):
            events.extend(lines)
    failure = json.loads(events[events.index("event: error") + 1].removeprefix("data: "))
    assert failure["error"]["code"] == "engine_unavailable"
