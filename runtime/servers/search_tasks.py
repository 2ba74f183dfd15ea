"""What a search has under way on servers, and its end."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any, TypeVar

from search.engine import EngineError

T = TypeVar("T")


class SearchTasks:
    """The requests of one search, which end together."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    async def together(self, tree: str, works: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
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
            raise EngineError(f"tree {tree!r} was aborted") from None
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
