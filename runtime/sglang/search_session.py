"""A search under way on SGLang servers: its requests and hints, its costs, what servers have read.

SGLang tells no search's share of its KV: ``kv_tokens_peak`` is what the search's live steps hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

from runtime.reward_format import Spelt
from runtime.servers.request_costs import Path, RequestCosts
from runtime.servers.search_tasks import SearchTasks
from runtime.sglang.generate_list import Take, generate_list
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Json, Replica
from runtime.sglang.step_request import StepRequest

MORE = "."
"""What the id of a list's next item has behind that of the one before: SGLang stops every request
whose id begins with the one that is named, so that a list is stopped by its first one at work."""


T = TypeVar("T")

_NUMBERS = count(1)


@dataclass(eq=False, slots=True)
class SearchSession:
    """What is known of one search.

    ``name`` begins its requests' ids: of one length for all but a list's further items. ``read``:
    the paths that its policy server has had in its cache, ``fresh`` those of the last round;
    ``logprobs``: of each path the last step's sum and number of tokens; ``scored``: by what steps a
    node is reached; ``early_rewards``: of paths as the reward model reads them, known before a
    round asks; ``following``: complete steps of chains, by their prefixes and seeds, until a round
    asks for them.
    """

    tree: str
    name: str
    notes: PluginNotes
    prompt: Path = ()
    costs: RequestCosts = field(default_factory=RequestCosts)
    requests: dict[str, Replica] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)
    fresh: set[Path] = field(default_factory=set)
    logprobs: dict[Path, tuple[float, int]] = field(default_factory=dict)
    spelt: Spelt = field(default_factory=dict)
    openings: set[Path] = field(default_factory=set)
    scored: dict[tuple[Path, ...], int] = field(default_factory=dict)
    early_rewards: dict[Path, float] = field(default_factory=dict)
    following: dict[tuple[Path, int], StepRequest] = field(default_factory=dict)
    _server: tuple[Replica, int] | None = None
    _tasks: SearchTasks = field(default_factory=SearchTasks)

    @property
    def namespace(self) -> str:
        """Cached tokens serve trees of the same one alone; empty: the common one."""
        return self.tree.rpartition("/")[0]

    def apart(self) -> SearchSession:
        """The same search with costs and paths of their own: stopped with it."""
        return replace(
            self,
            costs=RequestCosts(self.costs.flops),
            prompt=(),
            read=set(),
            fresh=set(),
            logprobs={},
        )

    def common(self, rid: str) -> dict[str, Any]:
        """What every request says beside its tokens."""
        return {"rid": rid} | ({"extra_key": self.namespace} if self.namespace else {})

    def on(self, server: Replica) -> None:
        """The next request goes there; another server than the last has read nothing yet, nor has
        one that was lost since."""
        life = server, server.failures
        if life != self._server:
            self.read.clear()
            self.fresh.clear()
        self._server = life

    def count_prefix(self, prefix: Path, answer: Json) -> None:
        """What a policy's request has cost that read a prefix."""
        cached = int(answer["meta_info"].get("cached_tokens") or 0)
        self.costs.read(len(prefix), cached, known=prefix in self.read)
        self.read.add(prefix)

    def count_step(self, prefix: Path, answer: Json, tokens: int) -> None:
        """What one has cost that drew so many tokens after a prefix."""
        self.count_prefix(prefix, answer)
        self.costs.add_decoded(len(prefix), tokens)

    @contextmanager
    def request(self, replica: Replica) -> Iterator[str]:
        """An id for a request, kept while the server may be at work on it."""
        with self.request_list(replica, [0]) as (rid,):
            yield rid

    @contextmanager
    def request_list(self, replica: Replica, lists: Sequence[int]) -> Iterator[list[str]]:
        """An id for each of several requests, by which of ``lists`` it goes in, kept until
        ``answered``, or until all are over."""
        following: dict[int, str] = {}
        rids: list[str] = []
        for of in lists:
            rids.append(following.get(of) or f"{self.name}{next(_NUMBERS):012x}")
            following[of] = rids[-1] + MORE
        self.requests.update(dict.fromkeys(rids, replica))
        try:
            yield rids
        except asyncio.CancelledError:
            raise  # the server does not know yet: whoever cancelled is to stop them
        except BaseException:
            self.answered(*rids)
            raise
        self.answered(*rids)

    def answered(self, *rids: str) -> None:
        """The server is not at work on these any more."""
        for rid in rids:
            self.requests.pop(rid, None)

    async def send_list(
        self, replica: Replica, bodies: Sequence[dict[str, Any]], take: Take
    ) -> None:
        """Have a server answer all of these in one request; ``take`` as in ``generate_list``."""
        by_priority = [body.get("priority", 0) for body in bodies]
        lists = range(len(bodies)) if replica.routed else by_priority
        with self.request_list(replica, lists) as rids:

            def answered(place: int, answer: Json) -> None:
                self.answered(rids[place])
                take(place, answer)

            named = [body | self.common(rid) for body, rid in zip(bodies, rids, strict=True)]
            await generate_list(replica, named, answered)

    async def together(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """As ``SearchTasks.together``."""
        return await self._tasks.together(self.tree, works)

    async def stop(self) -> None:
        """Give up what is under way, here and on the servers; a list by one request."""
        await self._tasks.stop()
        first_of_list: dict[str, tuple[str, Replica]] = {}
        for rid, replica in self.requests.items():
            first_of_list.setdefault(rid.rstrip(MORE), (rid, replica))
        self.requests.clear()
        at_work = first_of_list.values()
        await asyncio.gather(*(replica.abort(rid) for rid, replica in at_work if replica.up))
