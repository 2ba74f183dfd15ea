"""Draws steps before a round asks for them, on the policy's servers, at the lowest priority.

While the siblings of a complete step are still drawn or scored, its next children are begun, in
order of potential. A child's tokens do not depend on when it is drawn, so the round that asks for
it continues from what is there. SGLang admits such requests last, and takes their places and
memory back first. (FlashTTS, sections 4.1.1 and 4.1.2.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush

from runtime.servers.fleet import Fleet
from runtime.sglang.chain_request import next_in_chain
from runtime.sglang.replica import Replica
from runtime.sglang.search_session import SearchSession
from runtime.sglang.step_request import StepRequest
from search.engine import EngineDown, EngineError
from search.tree import Finish

log = logging.getLogger(__name__)

IDLE_PLACES = 32
"""Most requests on a server, requested ones included, up to which it may draw early: a decode pass
over so few rows is bound by reading the weights."""
SHARE = 0.25
"""The largest share of a server's KV that early steps of all searches may take."""
STOP_RETRY_SECONDS = 0.05
"""Seconds between aborts of a request, repeated because the server may not know it yet."""
LAST_SECONDS = 5.0
"""Most seconds to wait for early steps of a search that is over, to count their tokens."""
TRIAL_TOKENS = 512
"""Tokens drawn early after which a search's hit rate counts."""
LEAST_HIT_RATE = 0.25
"""The least share of its early tokens that a search must have used to draw more."""

Key = tuple[int, int]
"""A parent's node and a child's index."""
Place = tuple[int, int, int]
"""A child's place in its search's queue, least first: minus the number of its parent's children
that have not begun; its parent's order of arrival; its index."""


@dataclass(slots=True, eq=False)
class ExtensionTask:
    """A child's step that was begun early; ``rid``: the id of its request, once there is one."""

    request: StepRequest
    replica: Replica
    task: asyncio.Task[None] = field(init=False)
    rid: str = ""
    stopped: bool = False

    @property
    def running(self) -> bool:
        """Whether the step is still being drawn."""
        return not self.task.done()


@dataclass(slots=True)
class SearchExtensions:
    """One search's children that may begin, those that have begun, and its dead nodes."""

    queue: list[tuple[Place, StepRequest]] = field(default_factory=list)
    tasks: dict[Key, ExtensionTask] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)


class SglangBeamExtension:
    """Draws early steps for all searches of an engine."""

    def __init__(self, fleet: Fleet[Replica], *, on: bool) -> None:
        """``on``: whether steps are drawn early at all."""
        self._fleet = fleet
        self._on = on
        self._beams: dict[SearchSession, SearchExtensions] = {}
        self._arrivals = 0

    def enqueue(self, search: SearchSession, request: StepRequest) -> None:
        """Queue the children of a complete step, and begin what has room. A chain's next step has
        been drawn, or is when the others are."""
        ahead, most = request.branch.ahead, request.sampling.max_step_tokens
        if not self._on or ahead is None or request.finish is Finish.END:
            return
        child = next_in_chain(request)
        if child is not None and child.key in search.following:
            return
        if request.branch.early_limit(len(request.tokens), most) < 1:
            return
        self._arrivals += 1
        place = (-ahead.children, self._arrivals, 0)
        heappush(self._beams.setdefault(search, SearchExtensions()).queue, (place, request))
        search.cached_paths.add(request.path)
        self._start_next()

    async def resume(self, search: SearchSession, requests: Sequence[StepRequest]) -> None:
        """Give the requests of a round what was drawn early of them. All early drawing of the
        search stops; what the round does not ask for is kept for later rounds."""
        beams = self._beams.get(search)
        if beams is None:
            return
        beams.queue.clear()
        await self._stop(beams.tasks.values())
        _discard(search, beams, [key for key in beams.tasks if key[0] in beams.dead])
        for request in requests:
            extension = beams.tasks.get((request.branch.parent, request.branch.child))
            if extension is None or not _same(extension.request, request):
                continue
            del beams.tasks[request.branch.parent, request.branch.child]
            request.continue_from(extension.request)
            search.cached_paths.add(request.path)
            search.costs.counters.speculated_used += len(request.tokens)

    def mark_dead(self, search: SearchSession, nodes: Iterable[int]) -> None:
        """Record nodes that get no more children."""
        if search in self._beams:
            self._beams[search].dead.update(nodes)

    def finished_children(self, search: SearchSession) -> dict[int, StepRequest]:
        """By node: the first child drawn early whose step is complete."""
        tasks = self._beams[search].tasks if search in self._beams else {}
        children: dict[int, StepRequest] = {}
        for node, child in sorted(tasks):
            if tasks[node, child].request.finish is not None:
                children.setdefault(node, tasks[node, child].request)
        return children

    async def end(self, search: SearchSession) -> None:
        """Stop early drawing for a search that is over; what it did not use counts as wasted."""
        beams = self._beams.pop(search, None)
        if beams is None:
            return
        with suppress(TimeoutError):
            async with asyncio.timeout(LAST_SECONDS):
                await self._stop(beams.tasks.values())
        for extension in beams.tasks.values():
            extension.task.cancel()
        _discard(search, beams, list(beams.tasks))

    def _start_next(self) -> None:
        """Begin the first queued children while servers have room, evenly over searches."""
        searches = [search for search, beams in self._beams.items() if beams.queue]
        while searches:
            search = min(searches, key=self._running)
            replica = self._server_with_room(search)
            if replica is not None:
                self._start_child(search, replica)
            if replica is None or not self._beams[search].queue:
                searches.remove(search)

    def _running(self, search: SearchSession) -> int:
        return sum(extension.running for extension in self._beams[search].tasks.values())

    def _server_with_room(self, search: SearchSession) -> Replica | None:
        """The search's server if another early step may begin there: by hit rate, places, KV."""
        counters = search.costs.counters
        if not worthwhile(counters.speculated_used, counters.speculated_wasted):
            return None
        try:
            replica = self._fleet.place(search.tree, search.prompt)
        except EngineDown:  # the search's own requests raise it
            return None
        here = [
            extension
            for beams in self._beams.values()
            for extension in beams.tasks.values()
            if extension.replica is replica and extension.running
        ]
        if replica.under_way + len(here) >= min(IDLE_PLACES, replica.places):
            return None
        tasks = self._beams[search].tasks.values()
        tokens = sum(t.request.branch.limit if t.running else len(t.request.tokens) for t in tasks)
        return replica if tokens < SHARE * replica.kv_tokens / len(self._beams) else None

    def _start_child(self, search: SearchSession, replica: Replica) -> None:
        """Begin the first child in a search's queue, and queue its next sibling."""
        beams = self._beams[search]
        (rest, arrival, child), parent = heappop(beams.queue)
        ahead = parent.branch.ahead
        assert ahead is not None, "only those with children to come are offered"
        if child + 1 < ahead.children:
            heappush(beams.queue, ((rest + 1, arrival, child + 1), parent))
        branch = parent.branch.early_child(child, parent.tokens, parent.sampling.max_step_tokens)
        request = StepRequest(branch, parent.sampling, parent.stops, parent.eos)
        extension = ExtensionTask(request, replica)
        beams.tasks[branch.parent, child] = extension
        with self._fleet.routing.of(search.tree):
            extension.task = asyncio.create_task(self._sample(search, extension))
        extension.task.add_done_callback(lambda _: self._start_next())

    async def _sample(self, search: SearchSession, extension: ExtensionTask) -> None:
        """Draw until the step is complete or the extension is stopped. Failures are only logged,
        because the round that asks for the step draws it."""
        request, replica = extension.request, extension.replica
        try:
            while request.finish is None and not extension.stopped:
                note = search.notes.about(replica, len(search.prompt), None)
                with search.request(replica) as extension.rid:
                    body = request.body(note) | search.common(extension.rid)
                    before = request.path
                    answer = await replica.while_up(replica.generate(body, early=True))
                if not answer["meta_info"].get("output_token_logprobs"):
                    return
                request.take(answer)
                search.count_step(before, answer, len(request.path) - len(before))
        except EngineError as error:
            log.info("%s: an early step was not drawn: %s", replica.url, error)

    async def _stop(self, tasks: Iterable[ExtensionTask]) -> None:
        """Stop those that are running, and wait for the tokens that they have drawn."""
        await asyncio.gather(*(self._stop_one(task) for task in tasks if task.running))

    async def _stop_one(self, extension: ExtensionTask) -> None:
        extension.stopped = True
        while extension.running:
            if extension.rid:
                await extension.replica.abort(extension.rid)
            await asyncio.wait({extension.task}, timeout=STOP_RETRY_SECONDS)


def worthwhile(used_tokens: int, wasted_tokens: int) -> bool:
    """Whether to draw early: False if of enough early tokens too small a share was used."""
    total = used_tokens + wasted_tokens
    return total < TRIAL_TOKENS or used_tokens >= LEAST_HIT_RATE * total


def _discard(search: SearchSession, beams: SearchExtensions, keys: Sequence[Key]) -> None:
    for key in keys:
        search.costs.counters.speculated_wasted += len(beams.tasks.pop(key).request.tokens)


def _same(early: StepRequest, request: StepRequest) -> bool:
    """Whether an early request draws exactly what a round's request asks for."""
    return early.branch.draws_as(request.branch) and early.sampling == request.sampling
