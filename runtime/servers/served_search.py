"""A search under way on servers: what it has drawn, read and cost, and its end."""

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
    """What is known of one search, whose requests end together.

    ``read``: the paths that its policy server has had in its cache; ``logprobs``: of each path the
    last step's sum and number of tokens; ``spelt``: what the reward model reads of its steps.
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

    @property
    def namespace(self) -> str:
        """Cached tokens serve trees of the same one alone; empty: the common one."""
        return self.tree.rpartition("/")[0]

    def apart(self) -> Self:
        """The same search with costs and paths of their own (what ``__init__`` does not take):
        stopped with it."""
        return replace(self, costs=RequestCosts(self.costs.flops), prompt=())

    def begin(self, branches: Iterable[Branch]) -> None:
        """The prompt is what the first draws go on from, or the shortest of that."""
        self.prompt = self.prompt or min((branch.tokens for branch in branches), key=len)

    def on(self, server: RemoteServer) -> None:
        """The next request goes there; another server than the last has read nothing yet, nor has
        one that was lost since."""
        life = server, server.failures
        if life != self._server:
            self.cached_paths.clear()
        self._server = life

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
        """Give up what is under way."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
