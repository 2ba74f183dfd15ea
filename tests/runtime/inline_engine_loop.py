"""The engine's loop in the test's own process, on real tiny models."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, cast

from runtime.embedded.engine_loop import EngineLoop
from runtime.embedded.options import EngineOptions
from runtime.embedded.pipe import (
    Done,
    Embed,
    EngineEnd,
    Envelope,
    Expand,
    Failed,
    FromEngine,
    Release,
    Score,
    StepWords,
    ToEngine,
    TreeHint,
    seal,
)
from search.counters import Counters, Usage
from search.engine import Branch, Capabilities, EngineError, Hint, Sampling, Step, Trajectory

OURS = 1 << 40
"""InlineWorker numbers its own calls from here; a test's own messages use lower numbers."""


class Unreadable:
    """An object that can be pickled but raises ValueError when it is unpickled."""

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return int, ("no number",)


class LocalPipe:
    """Both ends of a pipe. ``replies``: the worker's messages for each call, in order."""

    def __init__(self) -> None:
        self.inbox: deque[ToEngine] = deque()
        self.replies: dict[int, list[Done | Failed]] = {}

    def send(self, message: FromEngine) -> None:
        """Take a message from the worker; replies to calls are recorded after a round trip."""
        if isinstance(message, Done | Failed):
            message = Envelope.of(bytes(seal(message))).open()
            self.replies.setdefault(message.call, []).append(message)

    def recv(self) -> Envelope:
        """The next message for the worker. Raises EOFError if there is none."""
        if not self.inbox:
            raise EOFError
        return Envelope.of(bytes(seal(self.inbox.popleft())))

    def poll(self, seconds: float = 0.0) -> bool:
        """Whether there is a message."""
        return bool(self.inbox)


class InlineWorker:
    """An ``Engine`` over an EngineLoop. ``on_turn`` is called before each of its turns."""

    def __init__(self, options: EngineOptions) -> None:
        self.pipe = LocalPipe()
        self.worker = EngineLoop(cast(EngineEnd, self.pipe), options)
        self.on_turn: Callable[[], None] = lambda: None
        self._calls = OURS
        self._turning: asyncio.Task[None] | None = None

    @property
    def capabilities(self) -> Capabilities:
        """The capabilities of the worker."""
        return self.worker._capabilities

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw a step for each branch."""
        return await self._ask(lambda call: Expand(call, tree, tuple(branches), sampling))

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Score the trajectories."""
        paths = tuple(trajectories)
        return await self._ask(lambda call: Score(call, tree, prompt, question, paths))

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Embed the last step of each trajectory."""
        steps = tuple(StepWords(t.steps[-1], t.texts[-1]) for t in trajectories)
        return await self._ask(lambda call: Embed(call, tree, steps))

    def hint(self, tree: str, hint: Hint) -> None:
        """Queue a hint for the worker."""
        self.pipe.inbox.append(TreeHint(tree, hint))

    async def release(self, tree: str) -> Counters:
        """Release the tree and return its costs."""
        return await self._ask(lambda call: Release(call, tree))

    async def abort(self, tree: str) -> Counters:
        """Release the tree."""
        return await self.release(tree)

    async def usage(self) -> Usage:
        """The worker's current KV usage and totals."""
        return self.worker._usage()

    async def health(self) -> None:
        """Do nothing: the engine is always healthy."""

    async def close(self) -> None:
        """Do nothing: there is no process to stop."""

    def work(self) -> None:
        """Run turns until inbox and worker are idle."""
        while self.pipe.inbox or self.worker.busy:
            self.on_turn()
            self.worker.turn()

    async def _ask(self, message: Callable[[int], ToEngine]) -> Any:
        self._calls += 1
        call = self._calls
        self.pipe.inbox.append(message(call))
        while call not in self.pipe.replies:
            if self._turning is None or self._turning.done():
                self._turning = asyncio.create_task(self._turn())
            await self._turning
        [answer] = self.pipe.replies.pop(call)
        if isinstance(answer, Failed):
            assert isinstance(answer.error, EngineError)
            raise answer.error
        return answer.value

    async def _turn(self) -> None:
        """Run one turn, after all concurrent callers have queued their messages."""
        await asyncio.sleep(0)
        self.on_turn()
        self.worker.turn()
