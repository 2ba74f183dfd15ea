"""A search under way on SGLang servers: its requests, its costs, what its servers have read."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from typing import Any, TypeVar

from runtime.reward_path import Spelt
from runtime.sglang.account import Account, Path
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Replica
from search.engine import EngineError

T = TypeVar("T")

_NUMBERS = count(1)


@dataclass(eq=False, slots=True)
class SearchSession:
    """What is known of one search.

    ``name`` begins its requests' ids: of one length for all, since SGLang stops every request whose
    id begins with the one that is named. ``read``: the paths that its policy server has had in its
    cache, ``fresh`` those of the last round; ``logprobs``: of each path the last step's sum and
    number of tokens; ``scored``: by what steps a node is reached.
    """

    tree: str
    name: str
    notes: PluginNotes
    prompt: Path = ()
    account: Account = field(default_factory=Account)
    requests: dict[str, Replica] = field(default_factory=dict)
    read: set[Path] = field(default_factory=set)
    fresh: set[Path] = field(default_factory=set)
    logprobs: dict[Path, tuple[float, int]] = field(default_factory=dict)
    spelt: Spelt = field(default_factory=dict)
    openings: set[Path] = field(default_factory=set)
    scored: dict[tuple[Path, ...], int] = field(default_factory=dict)
    _server: Replica | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)

    @property
    def namespace(self) -> str:
        """Cached tokens serve trees of the same one alone; empty: the common one."""
        return self.tree.rpartition("/")[0]

    def apart(self) -> SearchSession:
        """The same search with costs and paths of their own: stopped with it."""
        return replace(self, account=Account(), prompt=(), read=set(), fresh=set(), logprobs={})

    def common(self, rid: str) -> dict[str, Any]:
        """What every request says beside its tokens."""
        return {"rid": rid} | ({"extra_key": self.namespace} if self.namespace else {})

    def on(self, server: Replica) -> None:
        """The next request goes there; another server than the last has read nothing yet."""
        if server is not self._server:
            self.read.clear()
            self.fresh.clear()
        self._server = server

    @contextmanager
    def request(self, replica: Replica) -> Iterator[str]:
        """An id for a request, kept while the server may be at work on it."""
        rid = f"{self.name}{next(_NUMBERS):012x}"
        self.requests[rid] = replica
        try:
            yield rid
        except asyncio.CancelledError:
            raise  # the server does not know yet: whoever cancelled is to stop it
        except BaseException:
            self.requests.pop(rid, None)
            raise
        self.requests.pop(rid, None)

    async def together(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """What all of them come to, in order; when one fails, the others are given up.

        Raises EngineError if the search was stopped meanwhile.
        """
        tasks = [asyncio.ensure_future(work) for work in works]
        self._tasks.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise EngineError(f"tree {self.tree!r} was aborted") from None
        finally:
            for task in tasks:
                task.cancel()
            self._tasks.difference_update(tasks)

    async def stop(self) -> None:
        """Give up what is under way, here and on the servers."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        at_work = [(rid, replica) for rid, replica in self.requests.items() if replica.up]
        self.requests.clear()
        await asyncio.gather(*(replica.abort(rid) for rid, replica in at_work))
