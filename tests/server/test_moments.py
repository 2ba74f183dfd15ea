"""Every moment at which a client may leave: nothing stays held, and others are unharmed."""

from __future__ import annotations

import asyncio
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import pytest
from fastapi import FastAPI

from search.counters import Counters
from search.engine import Branch, Sampling, Step
from server.app import create_app
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, PlainText, question

T = TypeVar("T")

SEEDED = {"search": {"policy": "rebase", "width": 2, "max_depth": 2, "seed": 3}}
CHAT = {"model": "sprig", "messages": question("?"), "max_tokens": 16, "seed": 3}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "plain": ("/v1/chat/completions", CHAT),
    "plain stream": ("/v1/chat/completions", CHAT | {"stream": True}),
    "two choices": ("/v1/chat/completions", CHAT | {"n": 2}),
    "searched": ("/v1/chat/completions", CHAT | SEEDED),
    "searched stream": ("/v1/chat/completions", CHAT | SEEDED | {"stream": True}),
    "two prompts": ("/v1/completions", {"model": "sprig", "prompt": ["?", "!"], "max_tokens": 16}),
    "score": ("/v1/score", {"text_1": ["?", "!"], "text_2": ["a\n\nb", "c"]}),
    "search": ("/v1/search", {"question": "?"} | SEEDED),
    "search stream": ("/v1/search", {"question": "?"} | SEEDED | {"stream": True}),
    "background": ("/v1/search", {"question": "?", "background": True} | SEEDED),
    "background stream": (
        "/v1/search",
        {"question": "?", "background": True, "stream": True} | SEEDED,
    ),
}

LEAVER = "asked by who leaves"
LETTING_GO = 8
"""Steps of the event loop until a left request is cancelled; a whole tree takes more steps."""


def two_deep(branch: Branch) -> str:
    """Return a step, and then an answer."""
    return "The answer is 1." if branch.node else "A step\n\n"


class Reluctant(ScriptedEngine):
    """Takes some steps of the event loop to draw and to release a tree."""

    def __init__(self) -> None:
        super().__init__(say=two_deep)
        self.leavers: set[str] = set()

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw after six steps of the event loop."""
        if LEAVER in "".join(map(chr, branches[0].tokens)):
            self.leavers.add(tree)
        await steps(6)
        return await super().expand(tree, branches, sampling)

    async def release(self, tree: str) -> Counters:
        """Release after three steps."""
        await steps(3)
        return await super().release(tree)

    async def abort(self, tree: str) -> Counters:
        """Abort after three steps."""
        await steps(3)
        return await super().abort(tree)


async def steps(count: int) -> None:
    """Let the event loop run ``count`` steps."""
    for _ in range(count):
        await asyncio.sleep(0)


async def beside(work: Callable[..., T], *args: Any) -> T:
    """Stand in for ``asyncio.to_thread``; the thread takes three steps, cancelled or not."""

    async def thread() -> T:
        await steps(3)
        return work(*args)

    return await asyncio.shield(asyncio.create_task(thread()))


class House:
    """A server with one place, and what must hold in it at every step."""

    def __init__(self) -> None:
        self.engine = Reluctant()
        settings = Settings(max_running=1, step_tokens=8)
        self.service = create_service(settings, self.engine, PlainText())
        self.app: FastAPI = create_app(self.service)
        self.faults: list[dict[str, Any]] = []
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: self.faults.append(context))

    async def step(self) -> None:
        """Run one step of the event loop; a tree that grows has the place."""
        await asyncio.sleep(0)
        growing = {tree.partition(".")[0] for tree in self.engine.live}
        assert len(growing) <= self.service.admission.running <= 1

    @property
    def busy(self) -> bool:
        """Whether any request is open or any search under way."""
        return bool(self.service.admission.open or self.service.runner.under_way)

    def ended_trees(self) -> int:
        """Return how many trees of leaving clients were grown to their end."""
        return sum(tree in self.engine.leavers for tree in self.engine.released)

    def disconnects(self) -> float:
        """Return how many clients left, by the metric."""
        return self.service.metrics.disconnects.collect()[0].samples[0].value

    def check_nothing_is_held(self) -> None:
        """Check that no place, tree, queue entry, count or unhandled fault remains."""
        admission, metrics = self.service.admission, self.service.metrics
        assert (admission.open, admission.running, admission.waiting) == (0, 0, 0)
        assert not self.engine.live
        for share in admission.queues.values():
            assert (share.open, share.running, len(share.waiting)) == (0, 0, 0)
        for sample in metrics.in_flight.collect()[0].samples:
            assert sample.value == 0
        assert not self.faults


@pytest.fixture(scope="module", autouse=True)
def little_to_collect() -> Iterator[None]:
    """Freeze older objects: to scan them takes most of the time of these tests."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.parametrize("cut_off", [False, True])
@pytest.mark.parametrize("leaver", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
async def test_whoever_leaves_whenever(
    kind: str, leaver: int, cut_off: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two requests share one place. One of them is left by its client (or cut off by the server) at
    the first step of the event loop, then at the second, and so on until it is answered: at no step
    does a tree grow without the place, nothing stays held, and the other is answered."""
    monkeypatch.setattr(asyncio, "to_thread", beside)
    house = House()
    step = 0
    while not await leave_at(house, kind, leaver, step, cut_off):
        step += 1
    assert step > 12
    gc.collect()  # unretrieved exceptions are reported when collected
    await steps(2)
    assert not house.faults


async def leave_at(house: House, kind: str, leaver: int, step: int, cut_off: bool) -> bool:
    """Leave at this step, then check the rest; return whether the leaver was already answered."""
    path, body = KINDS[kind]
    before = house.disconnects()
    marked = json.loads(json.dumps(body).replace("?", LEAVER))
    calls = [Call(house.app, path, marked if i == leaver else body, pieces=3) for i in range(2)]
    leaving, staying = calls[leaver], calls[1 - leaver]
    for _ in range(step):
        await house.step()
    finished = leaving.task.done()
    if cut_off:
        leaving.task.cancel()
    else:
        leaving.disconnect.set()
    for _ in range(LETTING_GO):
        await house.step()
    ended_trees = house.ended_trees()
    while house.busy or not all(call.task.done() for call in calls):
        await house.step()
    if "background" not in body:
        assert house.ended_trees() == ended_trees
    staying.task.result()
    assert staying.complete
    if cut_off:
        assert leaving.task.cancelled() or leaving.complete
    else:
        assert house.disconnects() - before == (not leaving.complete)
    await steps(2)
    house.check_nothing_is_held()
    if "background" in body:
        await _check_kept(house, leaving)
    return finished


async def _check_kept(house: House, call: Call) -> None:
    """Check that a background search, if it was accepted, went on to its end."""
    if not call.messages:
        return
    searches = [house.service.store.get(name, "anybody") for name in house.engine.released]
    assert searches
    assert all(search is not None and json.loads(search.document)["answers"] for search in searches)
