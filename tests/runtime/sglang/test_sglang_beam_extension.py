"""Steps drawn early, without a server: who may begin, what a round gets, what is wasted.

The server here answers when it is told to; what SGLang makes of priorities is in test_servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from runtime.servers.fleet import Fleet
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.replica import Json, Replica
from runtime.sglang.search_session import PluginNotes, SearchSession
from runtime.sglang.sglang_beam_extension import (
    TRIAL_TOKENS,
    SglangBeamExtension,
    worthwhile,
)
from runtime.sglang.step_request import StepRequest
from runtime.stop_strings import StopStringTables
from search.engine import Ahead, Branch, EngineError, Sampling
from search.tree import Finish

PROMPT = (1, 2)
STOP, END = 3, 4
STOPS = StopStringTables((b"a", b"b", b"c", b"\n\n", b"<end>")).of(("\n\n",))


T = TypeVar("T")


class Told(Replica):
    """A server that answers a request when a test does."""

    def __init__(self) -> None:
        super().__init__("http://told", ServerTimes(1, 1, 1, 30))
        self.places, self.kv_tokens = 3, 10_000
        self.asked: dict[str, tuple[Json, asyncio.Future[Json]]] = {}
        self.aborted: list[str] = []

    async def generate(self, body: Json, *, early: bool = False) -> Json:
        assert early
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self.asked[body["rid"]] = body, answer
        return await answer

    async def abort(self, rid: str) -> None:
        """What was drawn until then: a token."""
        self.aborted.append(rid)
        if not self.asked[rid][1].done():
            self.asked[rid][1].set_result(answer(0))

    async def while_up(self, work: Coroutine[Any, Any, T]) -> T:
        """It is."""
        return await work

    async def seeds_asked(self) -> list[int]:
        """The seeds of the requests that wait for an answer, in the order sent."""
        await asyncio.sleep(0)
        waiting = [body for body, answer in self.asked.values() if not answer.done()]
        return [body["sampling_params"]["sampling_seed"] for body in waiting]

    async def tell(self, *tokens: int) -> None:
        """Answer the first request that waits."""
        await asyncio.sleep(0)
        next(a for _, a in self.asked.values() if not a.done()).set_result(answer(*tokens))
        await asyncio.sleep(0.01)


def answer(*tokens: int) -> Json:
    logprobs = [[-1.0, token, None] for token in tokens]
    tops = [[[-1.0, token, None]] for token in tokens]
    meta: dict[str, Any] = {"output_token_logprobs": logprobs, "output_top_logprobs": tops}
    return {"meta_info": {"prompt_tokens": 2, "cached_tokens": 1} | meta}


def ended(
    node: int, children: int = 2, finish: Finish = Finish.STEP, room: int = 100
) -> StepRequest:
    """A step of a root's child that is complete."""
    ahead = Ahead(seed=7, path=(node,), children=children, room=room)
    drawing = StepRequest(
        Branch(0, node, PROMPT, node, 16, node, ahead), Sampling(), STOPS, frozenset({END})
    )
    drawing.tokens, drawing.finish = [node % 3, STOP], finish
    return drawing


def asked_for(early: StepRequest, child: int, seed: int | None = None) -> StepRequest:
    """The round's own drawing of a child."""
    ahead, parent = early.branch.ahead, early.branch
    assert ahead is not None
    limit = min(early.sampling.max_step_tokens, ahead.room - len(early.tokens))
    wanted = ahead.child_seed(child) if seed is None else seed
    branch = Branch(parent.node, child, early.path, wanted, limit, 50 + child)
    return StepRequest(branch, early.sampling, STOPS, frozenset({END}))


def seed_of(drawing: StepRequest, child: int) -> int:
    """As the request for a child says it."""
    ahead = drawing.branch.ahead
    assert ahead is not None
    seed = ahead.child_seed(child)
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def searching(tree: str) -> SearchSession:
    return SearchSession(tree, f"{tree}-", PluginNotes(tree), prompt=PROMPT)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Told]:
    made = Told()
    yield made
    await made.close()


@pytest.fixture
def early(server: Told) -> SglangBeamExtension:
    return SglangBeamExtension(Fleet("policy", [server]), on=True)


async def test_the_likeliest_children_begin_first(server: Told, early: SglangBeamExtension) -> None:
    """Three places: a beam's two likeliest go before another's only one, its third comes last."""
    search, poor, rich = searching("a"), ended(1, children=1), ended(2, children=3)
    server.under_way = 3
    early.enqueue(search, poor)
    assert await server.seeds_asked() == []
    server.under_way = 0
    early.enqueue(search, rich)
    wanted = [seed_of(rich, 0), seed_of(rich, 1), seed_of(poor, 0)]
    assert await server.seeds_asked() == wanted
    await early.end(search)


async def test_a_place_that_is_free_again_is_filled(
    server: Told, early: SglangBeamExtension
) -> None:
    """By the next in line, while nothing else ends."""
    search, beam = searching("a"), ended(1, children=2)
    server.under_way = 2
    early.enqueue(search, beam)
    assert await server.seeds_asked() == [seed_of(beam, 0)]
    await server.tell(0, STOP)
    assert await server.seeds_asked() == [seed_of(beam, 1)]
    await early.end(search)


async def test_nothing_begins_where_no_server_is_left(
    server: Told, early: SglangBeamExtension
) -> None:
    """And the step that is complete stays so."""
    search, beam = searching("a"), ended(1)
    server.up = False
    early.enqueue(search, beam)
    assert await server.seeds_asked() == []


async def test_places_are_shared(server: Told, early: SglangBeamExtension) -> None:
    """The search that draws least early comes next, however likely another's children are."""
    first, second = searching("a"), searching("b")
    mine, theirs = ended(1, children=4), ended(2, children=1)
    server.under_way = 2
    early.enqueue(first, mine)
    assert await server.seeds_asked() == [seed_of(mine, 0)]
    server.under_way = 1
    early.enqueue(second, theirs)
    assert await server.seeds_asked() == [seed_of(mine, 0), seed_of(theirs, 0)]
    await early.end(first)
    await early.end(second)


async def test_a_round_goes_on_from_what_is_there(server: Told, early: SglangBeamExtension) -> None:
    """A whole step, and one that is stopped after a token; what it does not ask for waits, until
    its parent is dead."""
    search, beam, other = searching("a"), ended(1), ended(2, children=1)
    early.enqueue(search, beam)
    early.enqueue(search, other)
    await server.tell(0, 1, STOP)
    whole, part = asked_for(beam, 0), asked_for(beam, 1)
    await early.resume(search, [whole, part])
    assert (whole.tokens, whole.finish, whole.logprob) == ([0, 1, STOP], Finish.STEP, -3.0)
    assert (part.tokens, part.finish, part.logprob) == ([0], None, -1.0)
    assert part.body({})["input_ids"] == [*part.branch.tokens, 0]
    assert len(server.aborted) == 2
    assert (search.costs.counters.speculated_used, search.costs.counters.speculated_wasted) == (
        4,
        0,
    )
    early.mark_dead(search, [2])
    await early.resume(search, [late := asked_for(other, 0)])
    assert late.tokens == []
    assert (search.costs.counters.speculated_used, search.costs.counters.speculated_wasted) == (
        4,
        1,
    )
    assert not search.requests


async def test_what_has_ended_can_be_scored_early(server: Told, early: SglangBeamExtension) -> None:
    """A node's first child that is complete, until a round asks for it; not one under way."""
    search, beam = searching("a"), ended(1)
    assert early.finished_children(search) == {}
    early.enqueue(search, beam)
    assert early.finished_children(search) == {}
    await server.tell(0, 1, STOP)
    (child,) = early.finished_children(search).values()
    assert (child.tokens, child.branch.tokens) == ([0, 1, STOP], beam.path)
    await early.resume(search, [asked_for(beam, 0)])
    assert early.finished_children(search) == {}
    await early.end(search)


async def test_only_the_same_step_is_taken(server: Told, early: SglangBeamExtension) -> None:
    """Another seed asks for another step: what was drawn stays, and is wasted in the end."""
    search, beam = searching("a"), ended(1, children=1)
    early.enqueue(search, beam)
    await server.tell(0, STOP)
    await early.resume(search, [another := asked_for(beam, 0, seed=1)])
    assert another.tokens == []
    await early.end(search)
    assert (search.costs.counters.speculated_used, search.costs.counters.speculated_wasted) == (
        0,
        2,
    )


@pytest.mark.parametrize(
    "drawing", [ended(1, finish=Finish.END), ended(1, room=2)], ids=["end", "no room"]
)
async def test_what_has_no_children(
    server: Told, early: SglangBeamExtension, drawing: StepRequest
) -> None:
    """A trajectory that has ended, or is as long as it may be."""
    early.enqueue(searching("a"), drawing)
    assert await server.seeds_asked() == []


async def test_a_small_pool_is_left_alone(server: Told, early: SglangBeamExtension) -> None:
    """Early steps may take a quarter of it at most: here none fits beside the first."""
    search, beam = searching("a"), ended(1)
    server.kv_tokens = 16
    early.enqueue(search, beam)
    assert await server.seeds_asked() == [seed_of(beam, 0)]
    await early.end(search)


async def test_a_failure_is_nobodys(
    server: Told, early: SglangBeamExtension, caplog: pytest.LogCaptureFixture
) -> None:
    """It is told in the log; the round that asks for the step draws it."""
    caplog.set_level(logging.INFO)
    search, beam = searching("a"), ended(1, children=1)
    early.enqueue(search, beam)
    await server.seeds_asked()
    (_, request), *_ = server.asked.values()
    request.set_exception(EngineError("gone"))
    await early.resume(search, [asked := asked_for(beam, 0)])
    assert asked.tokens == []
    assert "an early step was not drawn: gone" in caplog.text
    await early.end(search)


def test_a_search_is_tried_before_its_hit_rate_counts() -> None:
    """Nothing is held against it until enough is known; then a quarter must have been used."""
    assert worthwhile(0, TRIAL_TOKENS - 1)
    assert not worthwhile(0, TRIAL_TOKENS)
    assert worthwhile(250, 750)
    assert not worthwhile(249, 751)
