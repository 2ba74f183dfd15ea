"""Steps drawn before a round asks for them, on the policy's servers, below all that is asked for.

A step that has ended while its siblings are still drawn, or are scored, goes on with its next
children, in order of potential. A child says the same whenever it is drawn, so the round that asks
for it goes on from what is there. SGLang lets such requests in last, and takes their places and
their memory back first. (FlashTTS, sections 4.1.1 and 4.1.2.)
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from heapq import heappop, heappush

from runtime.servers.fleet import Fleet
from runtime.sglang.replica import Replica
from runtime.sglang.search_session import SearchSession
from runtime.sglang.step_request import StepRequest
from search.engine import EngineDown, EngineError
from search.tree import Finish

log = logging.getLogger(__name__)

IDLE_PLACES = 32
"""Requests of a server, real ones among them, up to which it may draw early: a decode pass over so
few rows is bound by reading the weights."""
SHARE = 0.25
"""Of a server's KV, the most that early steps may take, all searches together."""
STOP_RETRY_SECONDS = 0.05
"""A request that is on its way when it is stopped is not known there yet: it is stopped again."""
LAST_SECONDS = 5.0
"""To learn what an ended search has wasted."""
TRIAL_TOKENS = 512
"""Tokens drawn early after which a search's hit rate is known."""
LEAST_HIT_RATE = 0.25
"""Share of its early tokens that a search must have used to have more drawn."""

Key = tuple[int, int]
"""A parent's node and a child's index."""
Place = tuple[int, int, int]
"""Where a child stands in its search's queue, least first: its potential, negated, less those of
its siblings that went before; its parent's arrival; its index."""


@dataclass(slots=True, eq=False)
class ExtensionTask:
    """A child's step, begun early; ``rid``: of the request that draws it, once there is one."""

    request: StepRequest
    replica: Replica
    task: asyncio.Task[None] = field(init=False)
    rid: str = ""
    stopped: bool = False

    @property
    def running(self) -> bool:
        """Whether it is being drawn."""
        return not self.task.done()


@dataclass(slots=True)
class SearchExtensions:
    """One search's: the children that may begin, those that have, and the nodes that died."""

    queue: list[tuple[Place, StepRequest]] = field(default_factory=list)
    tasks: dict[Key, ExtensionTask] = field(default_factory=dict)
    dead: set[int] = field(default_factory=set)


class SglangBeamExtension:
    """What all searches of an engine have drawn early, and what they may draw next."""

    def __init__(self, fleet: Fleet[Replica], *, on: bool) -> None:
        """Nothing is drawn early unless ``on``."""
        self._fleet = fleet
        self._on = on
        self._beams: dict[SearchSession, SearchExtensions] = {}
        self._arrivals = 0

    def enqueue(self, search: SearchSession, request: StepRequest) -> None:
        """A branch's step is complete: its children may begin."""
        ahead, most = request.branch.ahead, request.sampling.max_step_tokens
        if not self._on or ahead is None or request.finish is Finish.END:
            return
        if request.branch.early_limit(len(request.tokens), most) < 1:
            return
        self._arrivals += 1
        place = (-ahead.children, self._arrivals, 0)
        heappush(self._beams.setdefault(search, SearchExtensions()).queue, (place, request))
        search.cached_paths.add(request.path)
        self._start_next()

    async def resume(self, search: SearchSession, requests: Sequence[StepRequest]) -> None:
        """A round asks for these: each gets what was drawn of it, to go on from there. What it does
        not ask for stops, and waits for a round that does."""
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
        """These nodes get no children any more."""
        if search in self._beams:
            self._beams[search].dead.update(nodes)

    def finished_children(self, search: SearchSession) -> dict[int, StepRequest]:
        """By node, its first child whose step is complete and that no round has asked for."""
        tasks = self._beams[search].tasks if search in self._beams else {}
        children: dict[int, StepRequest] = {}
        for node, child in sorted(tasks):
            if tasks[node, child].request.finish is not None:
                children.setdefault(node, tasks[node, child].request)
        return children

    async def end(self, search: SearchSession) -> None:
        """A search has been stopped: what it did not ask for is wasted."""
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
        """Begin the likeliest children where places are idle, equally many of each search."""
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
        """Where one more of a search may begin: there is a place, memory, and a fair hit rate."""
        counters = search.costs.counters
        if not worthwhile(counters.speculated_used, counters.speculated_wasted):
            return None
        try:
            replica = self._fleet.place(search.tree, search.prompt)
        except EngineDown:  # the search hears of it where it asks
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
        """Draw a search's likeliest child; its next sibling takes its turn."""
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
        """Until the step is complete, or the request is stopped. A failure is none of the search's:
        the round that asks for the step draws it."""
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
        """Stop what is under way, and wait for what it has drawn."""
        await asyncio.gather(*(self._stop_one(task) for task in tasks if task.running))

    async def _stop_one(self, extension: ExtensionTask) -> None:
        extension.stopped = True
        while extension.running:
            if extension.rid:
                await extension.replica.abort(extension.rid)
            await asyncio.wait({extension.task}, timeout=STOP_RETRY_SECONDS)


def worthwhile(used_tokens: int, wasted_tokens: int) -> bool:
    """False once enough is known and too little of it, in tokens, was used."""
    total = used_tokens + wasted_tokens
    return total < TRIAL_TOKENS or used_tokens >= LEAST_HIT_RATE * total


def _discard(search: SearchSession, beams: SearchExtensions, keys: Sequence[Key]) -> None:
    for key in keys:
        search.costs.counters.speculated_wasted += len(beams.tasks.pop(key).request.tokens)


def _same(early: StepRequest, request: StepRequest) -> bool:
    """Whether what was drawn early is what a round asks for."""
    return early.branch.draws_as(request.branch) and early.sampling == request.sampling
