"""The queue: bounded, fair between keys tree by tree, and not in the way of running work."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import httpx2
import pytest
from fastapi import FastAPI

from search.engine import EngineDown
from server.admission import Admission, KeyQueue, QueueSlot, seconds_after_turn
from server.api_errors import ApiError
from server.api_keys import ApiKey
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import Call, in_time, question

BODY: dict[str, Any] = {"model": "sprig", "messages": question()}
CHAT = "/v1/chat/completions"


def key(name: str, **limits: Any) -> ApiKey:
    """Return a key without limits but for ``limits``."""
    room: dict[str, Any] = {"running": 99, "queued": 99, "width": 9, "depth": 9}
    room |= {"prompt_tokens": 9, "tree_tokens": 9} | limits
    return ApiKey(name=name, **room)


async def queued_slot(admission: Admission, owner: ApiKey) -> QueueSlot:
    """Take a slot and start to wait for its turn."""
    slot = admission.take(owner)
    task = asyncio.create_task(slot.turn(60))
    await asyncio.sleep(0)
    task.cancel()  # the slot keeps its place
    return slot


async def turn_order(admission: Admission, slots: list[QueueSlot]) -> list[str]:
    """Return the keys' names in the order of their turns, with one place at a time."""
    order = []
    while running := [t for t in slots if t.granted]:
        (first,) = running
        order.append(first.key.name)
        slots.remove(first)
        first.close()
    assert (admission.open, admission.running) == (0, 0)
    return order


async def test_trees_start_in_turn_between_keys_not_in_order_of_arrival() -> None:
    """By hand: Ann's six came first, yet each of Bob's two waits for only one of Ann's."""
    admission = Admission(running=1, queued=99, retry_after=1)
    ann, bob = key("ann"), key("bob")
    slots = [await queued_slot(admission, owner) for owner in [ann] * 6 + [bob] * 2]
    assert await turn_order(admission, slots) == ["ann", "bob", "ann", "bob"] + ["ann"] * 4


def test_open_requests_hold_so_many_bytes() -> None:
    """By hand: 1,000 bytes in all, 500 for a key; a single body may exceed its key's half."""
    admission = Admission(running=9, queued=9, retry_after=1, most_bytes=1000)
    ann, bob = key("ann"), key("bob")
    first = admission.take(ann, 400)
    with pytest.raises(ApiError) as ann_error:
        admission.take(ann, 200)
    assert ann_error.value.code == "rate_limit_exceeded"
    large = admission.take(bob, 600)
    with pytest.raises(ApiError) as full_error:
        admission.take(ann, 1)
    assert full_error.value.code == "queue_full"
    for slot in (first, large):
        slot.close()
    assert admission.bytes == 0
    admission.take(ann, 500)


def test_a_key_may_have_half_of_the_bytes() -> None:
    """By hand: twice 250 of 1,000, then not one byte more; a request without a body has none."""
    admission = Admission(running=9, queued=9, retry_after=1, most_bytes=1000)
    ann = key("ann")
    assert [admission.take(ann, size).size for size in (250, 250)] == [250, 250]
    assert admission.take(ann).size == 0
    with pytest.raises(ApiError) as error:
        admission.take(ann, 1)
    assert error.value.code == "rate_limit_exceeded"


async def test_between_keys_that_are_even_the_older_request_goes_first() -> None:
    """Bob was here before, but Ann's request has waited longer than his for Eve's place."""
    admission = Admission(running=1, queued=99, retry_after=1)
    admission.take(key("bob")).close()
    slots = [await queued_slot(admission, key(name)) for name in ("eve", "ann", "bob")]
    assert await turn_order(admission, slots) == ["eve", "ann", "bob"]


async def test_weights_share_the_places() -> None:
    """Weight 3 against 1: three trees for each one, while both have trees waiting."""
    admission = Admission(running=1, queued=99, retry_after=1)
    ann, bob = key("ann", weight=3.0), key("bob")
    slots = [await queued_slot(admission, owner) for owner in [ann] * 9 + [bob] * 9]
    order = await turn_order(admission, slots)
    assert order[:12].count("ann") == 9


async def test_who_was_away_has_saved_nothing_up() -> None:
    """A key that comes late gets its share from then on, and is not owed the past.

    Five of Ann's ran before Bob's first, which goes first, ahead of two of hers. His next comes
    when none of his waits: it goes after the one of hers that has waited longer.
    """
    admission = Admission(running=1, queued=99, retry_after=1)
    ann, bob = key("ann"), key("bob")
    early_slots = [await queued_slot(admission, ann) for _ in range(5)]
    for slot in early_slots:
        assert slot.granted
        slot.close()
    slots = [await queued_slot(admission, owner) for owner in (bob, ann, ann, bob)]
    assert await turn_order(admission, slots) == ["bob", "ann", "bob", "ann"]


async def test_who_leaves_the_queue_is_passed_over() -> None:
    """The second of three leaves before its turn, and the turn goes to the third."""
    admission = Admission(running=1, queued=99, retry_after=1)
    names = ("ann", "bob", "eve")
    first, second, third = [await queued_slot(admission, key(name)) for name in names]
    second.close()
    assert admission.waiting == 1
    assert await turn_order(admission, [first, third]) == ["ann", "eve"]
    assert not second.granted


async def test_a_keys_own_trees_at_once_are_bounded() -> None:
    """Ann's third tree waits although there is room; another key's tree passes it."""
    admission = Admission(running=9, queued=99, retry_after=1)
    ann = key("ann", running=2)
    slots = [await queued_slot(admission, owner) for owner in (ann, ann, ann, key("bob"))]
    assert [t.granted for t in slots] == [True, True, False, True]
    slots[0].close()
    assert slots[2].granted


async def test_a_full_queue_refuses_and_says_when_to_come_back() -> None:
    """Places are counted when taken: those of the server, or those of one key."""
    admission = Admission(running=1, queued=2, retry_after=7)
    ann = key("ann", running=1, queued=1)
    first = admission.take(ann)
    admission.take(ann)
    with pytest.raises(ApiError) as ann_error:
        admission.take(ann)
    admission.take(key("bob"))
    with pytest.raises(ApiError) as full_error:
        admission.take(key("eve"))
    assert (ann_error.value.code, full_error.value.code) == ("rate_limit_exceeded", "queue_full")
    for error in (ann_error.value, full_error.value):
        assert error.status_code == 429
        assert (error.headers or {})["retry-after"] == "7"
        assert "come back in 7 s" in str(error.detail)
    first.close()
    first.close()  # the second call does nothing
    admission.take(key("eve"))


@in_time
async def test_a_turn_that_comes_as_its_client_leaves_is_given_back() -> None:
    """In one step of the event loop a slot gets its turn and is closed: the next slot gets it."""
    admission = Admission(running=1, queued=9, retry_after=1)
    first, second, third = (admission.take(key("ann")) for _ in range(3))
    numbers: list[int] = []

    async def grow(slot: QueueSlot) -> None:
        await slot.turn(60)
        numbers.append(slot.number)
        await asyncio.sleep(0)

    works = [slot.start(grow(slot)) for slot in (first, second, third)]
    while not second.granted:
        await asyncio.sleep(0)
    second.close()
    await asyncio.gather(*works, return_exceptions=True)
    assert works[1].cancelled()
    assert numbers == [first.number, third.number]
    assert admission.open == 0


@in_time
async def test_work_that_lets_go_is_not_cut_short() -> None:
    """Cancelled by an operator and again as its client leaves, work cleans up once, completely."""
    admission = Admission(running=9, queued=9, retry_after=1)
    released: list[str] = []

    async def grow() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            for part in ("tree", "engine"):
                await asyncio.sleep(0)
                released.append(part)

    slot = admission.take(key("ann"))
    work = slot.start(grow())
    await asyncio.sleep(0)
    slot.cancel()
    await asyncio.sleep(0)
    slot.close()
    with pytest.raises(asyncio.CancelledError):
        await work
    assert released == ["tree", "engine"]


@in_time
async def test_a_fault_of_what_a_client_left_behind_is_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Only the unexpected fault is logged; an engine that is down and a cancellation are not."""
    admission = Admission(running=9, queued=9, retry_after=1)

    async def fail_at_the_end(error: Exception | None) -> None:
        try:
            await asyncio.sleep(60)
        finally:
            if error is not None:
                raise error

    for error in (ZeroDivisionError(), EngineDown("down"), None):
        slot = admission.take(key("ann"))
        slot.start(fail_at_the_end(error))
        await asyncio.sleep(0)
        slot.close()
    while admission.open:
        await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.name == "hedgerow.admission"
    assert record.exc_info is not None
    assert record.exc_info[0] is ZeroDivisionError


@in_time
async def test_a_fault_that_somebody_hears_of_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Checked for a request that still waits, and for work kept beyond its request."""
    admission = Admission(running=9, queued=9, retry_after=1)

    async def fail() -> None:
        raise ZeroDivisionError

    for outlives_request in (False, True):
        slot = admission.take(key("ann"))
        work = slot.start(fail(), outlives_request=outlives_request)
        if outlives_request:
            slot.close()
        with pytest.raises(ZeroDivisionError):
            await work
    assert admission.open == 0
    assert caplog.records == []


@in_time
async def test_how_long_each_waited_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """By hand: the first goes at once, the second after 3 seconds, the third gives up at once."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("server.admission.time", clock)
    waits: list[float] = []
    admission = Admission(running=1, queued=9, retry_after=1, waited=waits.append)
    first, second, third = (admission.take(key("ann")) for _ in range(3))
    await first.turn(60)
    turn = asyncio.create_task(second.turn(60))
    await asyncio.sleep(0)
    clock.now += 3
    first.close()
    await turn
    with pytest.raises(ApiError):
        await third.turn(0)
    assert waits == [0.0, 3.0, 0.0]


async def test_what_the_queue_took_is_off_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 5 seconds, 2 in the queue leave 3 and 9 leave none; without a queue all 5 are left."""
    clock = SimpleNamespace(now=100.0, monotonic=lambda: clock.now)
    monkeypatch.setattr("server.admission.time", clock)

    class Waiting(QueueSlot):
        async def turn(self, seconds: float) -> None:
            assert seconds == 5.0
            clock.now += self.number

    admission = Admission(running=1, queued=9, retry_after=1)
    share = KeyQueue(key("ann"))
    rest = [await seconds_after_turn(Waiting(admission, share, wait, 0), 5.0) for wait in (2, 9)]
    assert rest == [3.0, 0.0]
    assert await seconds_after_turn(None, 5.0) == 5.0


@pytest.mark.promise(
    "A full queue refuses a request before anything is spent on it, and says when to retry."
)
@pytest.mark.parametrize("settings", [{"max_running": 1, "max_queued": 1}], indirect=True)
@in_time
async def test_overload_is_refused_before_anything_is_spent(
    app: FastAPI, http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """One runs, one waits, the third is told to come back; the first two are answered."""
    engine.gate = asyncio.Event()
    first = Call(app, CHAT, BODY)
    await engine.waiting.wait()
    second = Call(app, CHAT, BODY)
    while app.state.service.admission.waiting < 1:
        await asyncio.sleep(0)
    third = await http.post(CHAT, content=b"{ not even read")
    assert third.status_code == 429
    assert third.json()["error"]["code"] == "queue_full"
    assert int(third.headers["retry-after"]) > 0
    assert len(engine.live) == 1
    assert (await http.get("/health")).status_code == 200
    engine.gate.set()
    await asyncio.gather(first.task, second.task)
    assert first.complete
    assert second.complete
    assert app.state.service.admission.open == 0


@pytest.mark.parametrize("settings", [{"max_running": 1}], indirect=True)
@pytest.mark.parametrize("stream", [False, True])
@in_time
async def test_who_leaves_the_queue_gives_the_place_back(
    app: FastAPI, engine: ScriptedEngine, stream: bool
) -> None:
    """A client that leaves while it waits never reaches the engine."""
    engine.gate = asyncio.Event()
    first = Call(app, CHAT, BODY)
    await engine.waiting.wait()
    second = Call(app, CHAT, BODY | {"stream": stream})
    while app.state.service.admission.waiting < 1:
        await asyncio.sleep(0)
    second.disconnect.set()
    await second.task
    engine.gate.set()
    await first.task
    assert (len(engine.released), engine.aborted) == (1, [])
    assert app.state.service.admission.open == 0


@pytest.mark.parametrize("settings", [{"max_running": 1}], indirect=True)
@in_time
async def test_the_deadline_counts_the_queue(
    app: FastAPI, http: httpx2.AsyncClient, engine: ScriptedEngine
) -> None:
    """A request that waits past its deadline gets a 504 that says not to retry."""
    engine.gate = asyncio.Event()
    first = Call(app, CHAT, BODY)
    await engine.waiting.wait()
    late = await http.post(CHAT, json=BODY | {"search": {"width": 2, "deadline_ms": 20}})
    assert late.status_code == 504
    assert late.json()["error"]["code"] == "deadline_exceeded"
    assert "queue" in late.json()["error"]["message"]
    assert late.headers["x-should-retry"] == "false"
    engine.gate.set()
    await first.task
