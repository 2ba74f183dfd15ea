"""A search in progress on servers: what it has drawn, read and cost, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from typing import Any, Self, TypeVar

from runtime.reward_format import Spelt
from runtime.servers.remote_server import RemoteServer
from runtime.servers.request_costs import Path, RequestCosts
from search.engine import Branch, EngineError

T = TypeVar("T")


@dataclass(eq=False, slots=True)
class ServedSearch:
    """The state of one search, whose requests are stopped together.

    ``cached_paths``: those that its policy server has had in its cache; ``logprobs``: by path the
    last step's sum and number of tokens; ``spelt``: ids of its steps for the reward model.
    """

    tree: str
    _: KW_ONLY
    prompt: Path = ()
    costs: RequestCosts = field(default_factory=RequestCosts)
    cached_paths: set[Path] = field(default_factory=set, init=False)
    logprobs: dict[Path, tuple[float, int]] = field(default_factory=dict, init=False)
    spelt: Spelt = field(default_factory=dict)
    _server: tuple[RemoteServer, int] | None = None
    _tasks: set[asyncio.Task[Any]] = field(default_factory=set)
    _stopped: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def namespace(self) -> str:
        """Trees share cached tokens only within a namespace; empty: the common one."""
        return self.tree.rpartition("/")[0]

    def apart(self) -> Self:
        """A copy with separate costs and paths (the fields that ``__init__`` does not take), which
        is stopped together with this search."""
        return replace(self, costs=RequestCosts(self.costs.flops), prompt=())

    def begin(self, branches: Iterable[Branch]) -> None:
        """Set the prompt, if it is not set: the shortest prefix of the first branches."""
        self.prompt = self.prompt or min((branch.tokens for branch in branches), key=len)

    def on(self, server: RemoteServer) -> None:
        """Note that the next request goes to ``server``; if it is another one than before, or was
        lost since, nothing counts as cached there."""
        life = server, server.failures
        if life != self._server:
            self.cached_paths.clear()
        self._server = life

    async def together(self, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
        """The results of all, in order; when one fails, the others are cancelled.

        Raises EngineError if the search was stopped meanwhile, or before.
        """
        if self._stopped.is_set():
            for work in works:
                work.close()
            raise self._aborted()
        tasks = [asyncio.ensure_future(work) for work in works]
        self._tasks.update(tasks)
        try:
            return list(await asyncio.gather(*tasks))
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if caller is None or caller.cancelling():
                raise
            raise self._aborted() from None
        finally:
            for task in tasks:
                task.cancel()
            self._tasks.difference_update(tasks)

    async def stop(self) -> None:
        """Cancel all work of the search, and wait for its end; there will be no more."""
        self._stopped.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _aborted(self) -> EngineError:
        return EngineError(f"tree {self.tree!r} was aborted")
