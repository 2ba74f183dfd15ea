"""Steps drawn early, without a server: which begin, what a round takes over, what is wasted.

The server here answers when a test says so; SGLang's use of priorities is in test_servers.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine
from dataclasses import replace
from typing import Any, TypeVar

import pytest
import pytest_asyncio

from runtime.servers.fleet import Fleet
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.chain_request import next_in_chain
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


class Stub(Replica):
    """A server whose requests wait until a test answers them."""

    def __init__(self) -> None:
        super().__init__("http://told", ServerTimes(1, 1, 1, 30))
        self.places, self.kv_tokens = 3, 10_000
        self.pending: dict[str, tuple[Json, asyncio.Future[Json]]] = {}
        self.aborted: list[str] = []

    async def generate(self, body: Json, *, early: bool = False) -> Json:
        assert early
        answer: asyncio.Future[Json] = asyncio.get_running_loop().create_future()
        self.pending[body["rid"]] = body, answer
        return await answer

    async def abort(self, rid: str) -> None:
        """Answer an aborted request with one drawn token."""
        self.aborted.append(rid)
        if not self.pending[rid][1].done():
            self.pending[rid][1].set_result(answer(0))

    async def while_up(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` as if the server stayed up."""
        return await work

    async def waiting_seeds(self) -> list[int]:
        """The seeds of the unanswered requests, in the order sent."""
        await asyncio.sleep(0)
        waiting = [body for body, answer in self.pending.values() if not answer.done()]
        return [body["sampling_params"]["sampling_seed"] for body in waiting]

    async def tell(self, *tokens: int) -> None:
        """Answer the first unanswered request with these tokens."""
        await asyncio.sleep(0)
        next(a for _, a in self.pending.values() if not a.done()).set_result(answer(*tokens))
        await asyncio.sleep(0.01)


def answer(*tokens: int) -> Json:
    logprobs = [[-1.0, token, None] for token in tokens]
    tops = [[[-1.0, token, None]] for token in tokens]
    meta: dict[str, Any] = {"output_token_logprobs": logprobs, "output_top_logprobs": tops}
    return {"meta_info": {"prompt_tokens": 2, "cached_tokens": 1} | meta}


def whole_step(
    node: int, children: int = 2, finish: Finish = Finish.STEP, room: int = 100
) -> StepRequest:
    """A complete step of the root's child ``node``."""
    ahead = Ahead(seed=7, path=(node,), children=children, room=room)
    drawing = StepRequest(
        Branch(0, node, PROMPT, node, 16, node, ahead), Sampling(), STOPS, frozenset({END})
    )
    drawing.tokens, drawing.finish = [node % 3, STOP], finish
    return drawing


def round_child(early: StepRequest, child: int, seed: int | None = None) -> StepRequest:
    """The request that a round makes for a child of ``early``."""
    ahead, parent = early.branch.ahead, early.branch
    assert ahead is not None
    limit = min(early.sampling.max_step_tokens, ahead.room - len(early.tokens))
    child_seed = ahead.child_seed(child) if seed is None else seed
    branch = Branch(parent.node, child, early.path, child_seed, limit, 50 + child)
    return StepRequest(branch, early.sampling, STOPS, frozenset({END}))


def seed_of(drawing: StepRequest, child: int) -> int:
    """A child's seed as the signed number that its request has."""
    ahead = drawing.branch.ahead
    assert ahead is not None
    seed = ahead.child_seed(child)
    return seed - (1 << 64) if seed >= 1 << 63 else seed


def searching(tree: str) -> SearchSession:
    return SearchSession(tree, f"{tree}-", PluginNotes(tree), prompt=PROMPT)


@pytest_asyncio.fixture
async def server() -> AsyncIterator[Stub]:
    manual = Stub()
    yield manual
    await manual.close()


@pytest.fixture
def early(server: Stub) -> SglangBeamExtension:
    return SglangBeamExtension(Fleet("policy", [server]), on=True)


async def test_the_likeliest_children_begin_first(server: Stub, early: SglangBeamExtension) -> None:
    """With three places a beam's two likeliest children go before another's only child."""
    search, poor, rich = searching("a"), whole_step(1, children=1), whole_step(2, children=3)
    server.under_way = 3
    early.enqueue(search, poor)
    assert await server.waiting_seeds() == []
    server.under_way = 0
    early.enqueue(search, rich)
    expected = [seed_of(rich, 0), seed_of(rich, 1), seed_of(poor, 0)]
    assert await server.waiting_seeds() == expected
    await early.end(search)


async def test_a_place_that_is_free_again_is_filled(
    server: Stub, early: SglangBeamExtension
) -> None:
    """A place freed by a finished early step goes to the next child in line."""
    search, beam = searching("a"), whole_step(1, children=2)
    server.under_way = 2
    early.enqueue(search, beam)
    assert await server.waiting_seeds() == [seed_of(beam, 0)]
    await server.tell(0, STOP)
    assert await server.waiting_seeds() == [seed_of(beam, 1)]
    await early.end(search)


async def test_nothing_begins_where_no_server_is_left(
    server: Stub, early: SglangBeamExtension
) -> None:
    """With no server up, enqueueing a complete step requests nothing."""
    search, beam = searching("a"), whole_step(1)
    server.up = False
    early.enqueue(search, beam)
    assert await server.waiting_seeds() == []


async def test_places_are_shared(server: Stub, early: SglangBeamExtension) -> None:
    """The search with the fewest early steps is next, however likely another's children are."""
    first, second = searching("a"), searching("b")
    mine, theirs = whole_step(1, children=4), whole_step(2, children=1)
    server.under_way = 2
    early.enqueue(first, mine)
    assert await server.waiting_seeds() == [seed_of(mine, 0)]
    server.under_way = 1
    early.enqueue(second, theirs)
    assert await server.waiting_seeds() == [seed_of(mine, 0), seed_of(theirs, 0)]
    await early.end(first)
    await early.end(second)


async def test_a_round_goes_on_from_what_is_there(server: Stub, early: SglangBeamExtension) -> None:
    """A round takes over a whole early step and one stopped after a token; a child it does not ask
    for waits until its parent is dead."""
    search, beam, other = searching("a"), whole_step(1), whole_step(2, children=1)
    early.enqueue(search, beam)
    early.enqueue(search, other)
    await server.tell(0, 1, STOP)
    whole, part = round_child(beam, 0), round_child(beam, 1)
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
    await early.resume(search, [late := round_child(other, 0)])
    assert late.tokens == []
    assert (search.costs.counters.speculated_used, search.costs.counters.speculated_wasted) == (
        4,
        1,
    )
    assert not search.requests


async def test_what_has_ended_can_be_scored_early(server: Stub, early: SglangBeamExtension) -> None:
    """A node's first complete child can be scored early until a round asks for it."""
    search, beam = searching("a"), whole_step(1)
    assert early.finished_children(search) == {}
    early.enqueue(search, beam)
    assert early.finished_children(search) == {}
    await server.tell(0, 1, STOP)
    (child,) = early.finished_children(search).values()
    assert (child.tokens, child.branch.tokens) == ([0, 1, STOP], beam.path)
    await early.resume(search, [round_child(beam, 0)])
    assert early.finished_children(search) == {}
    await early.end(search)


async def test_only_the_same_step_is_taken(server: Stub, early: SglangBeamExtension) -> None:
    """A step with another seed is not taken over; the early tokens end as wasted."""
    search, beam = searching("a"), whole_step(1, children=1)
    early.enqueue(search, beam)
    await server.tell(0, STOP)
    await early.resume(search, [another := round_child(beam, 0, seed=1)])
    assert another.tokens == []
    await early.end(search)
    assert (search.costs.counters.speculated_used, search.costs.counters.speculated_wasted) == (
        0,
        2,
    )


@pytest.mark.parametrize(
    "drawing", [whole_step(1, finish=Finish.END), whole_step(1, room=2)], ids=["end", "no room"]
)
async def test_what_has_no_children(
    server: Stub, early: SglangBeamExtension, drawing: StepRequest
) -> None:
    """Nothing begins below a finished trajectory or one without room for another step."""
    early.enqueue(searching("a"), drawing)
    assert await server.waiting_seeds() == []


async def test_a_chain_needs_no_early_steps(server: Stub, early: SglangBeamExtension) -> None:
    """Nothing begins below a step whose chain goes on in the search's own requests."""
    search, parent = searching("a"), whole_step(1)
    assert parent.branch.ahead is not None
    parent.branch = replace(parent.branch, ahead=replace(parent.branch.ahead, steps=3))
    child = next_in_chain(parent)
    assert child is not None
    search.following[child.key] = child
    early.enqueue(search, parent)
    assert await server.waiting_seeds() == []
    del search.following[child.key]
    early.enqueue(search, parent)
    assert await server.waiting_seeds() == [seed_of(parent, 0), seed_of(parent, 1)]
    await early.end(search)


async def test_a_small_pool_is_left_alone(server: Stub, early: SglangBeamExtension) -> None:
    """Early steps may use at most a quarter of the pool: here only the first one fits."""
    search, beam = searching("a"), whole_step(1)
    server.kv_tokens = 16
    early.enqueue(search, beam)
    assert await server.waiting_seeds() == [seed_of(beam, 0)]
    await early.end(search)


async def test_a_failure_is_nobodys(
    server: Stub, early: SglangBeamExtension, caplog: pytest.LogCaptureFixture
) -> None:
    """An early step's failure is only logged; the round that asks for the step draws it."""
    caplog.set_level(logging.INFO)
    search, beam = searching("a"), whole_step(1, children=1)
    early.enqueue(search, beam)
    await server.waiting_seeds()
    (_, request), *_ = server.pending.values()
    request.set_exception(EngineError("gone"))
    await early.resume(search, [child := round_child(beam, 0)])
    assert child.tokens == []
    assert "an early step was not drawn: gone" in caplog.text
    await early.end(search)


def test_a_search_is_tried_before_its_hit_rate_counts() -> None:
    """Early drawing goes on until TRIAL_TOKENS are wasted, then only if a quarter was used."""
    assert worthwhile(0, TRIAL_TOKENS - 1)
    assert not worthwhile(0, TRIAL_TOKENS)
    assert worthwhile(250, 750)
    assert not worthwhile(249, 751)
