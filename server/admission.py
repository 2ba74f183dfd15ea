"""Admission of requests: which may search now, which wait, which are refused; fair between keys.

Start-time fair queueing (Goyal, Vin, Cheng 1996) with the tree as the unit: the key that has
started fewer trees for its weight goes first. Admission never changes what a tree becomes.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from server.api_errors import ApiError, unforeseen
from server.api_keys import ApiKey

T = TypeVar("T")

log = logging.getLogger("hedgerow.admission")


@dataclass(slots=True, eq=False)
class KeyQueue:
    """One key's open slots, the bytes of their bodies, its running trees and its waiting slots."""

    key: ApiKey
    open: int = 0
    bytes: int = 0
    running: int = 0
    next_start: float = 0.0
    waiting: deque[QueueSlot] = field(default_factory=deque)


class QueueSlot:
    """A request's place: taken before any work is done for the request, given back once.

    It is given back when the work that was started under it has ended, or, if no work was started,
    when the request is over. So no tree ever grows without a place.
    """

    def __init__(self, admission: Admission, queue: KeyQueue, number: int, size: int) -> None:
        self.key = queue.key
        self.number = number
        self.size = size
        self.granted = False
        self._admission = admission
        self._queue = queue
        self._turn: asyncio.Future[None] | None = None
        self._work: asyncio.Task[Any] | None = None
        self._outlives_request = False
        self._cancelled = False
        self._closed = False

    def start(
        self, work: Coroutine[Any, Any, T], *, outlives_request: bool = False
    ) -> asyncio.Task[T]:
        """Run ``work`` as a task that holds this place until the task ends.

        The task is cancelled when the request is over, unless ``outlives_request`` is true.
        """
        assert self._work is None, "a slot is for one tree"
        assert not self._closed, "the place has been given back"
        task = asyncio.create_task(work)
        self._work, self._outlives_request = task, outlives_request
        task.add_done_callback(self._on_work_done)
        return task

    async def turn(self, seconds: float) -> None:
        """Wait until the tree may grow. Raises ApiError (504) after ``seconds``."""
        assert self._turn is None, "a slot is for one tree"
        self._turn = asyncio.get_running_loop().create_future()
        start = time.monotonic()
        self._admission.wait(self, self._queue)
        try:
            async with asyncio.timeout(seconds):
                await asyncio.shield(self._turn)
        except TimeoutError:
            raise queue_timeout(seconds) from None
        finally:
            self._admission.waited(time.monotonic() - start)

    def grant(self) -> None:
        """Let the slot's tree grow; the admission calls this when it is the slot's turn."""
        assert self._turn is not None, "a slot that does not wait is granted nothing"
        self.granted = True
        if not self._turn.done():  # the waiting request may have been cancelled
            self._turn.set_result(None)

    def close(self) -> None:
        """End the request: cancel its work or give the place back. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        if self._work is None:
            self._admission.leave(self, self._queue)
        elif not self._outlives_request:
            self.cancel()

    def cancel(self) -> None:
        """Cancel the work, once: a second cancellation would interrupt its clean-up."""
        if self._work is not None and not self._cancelled:
            self._cancelled = True
            self._work.cancel()

    def _on_work_done(self, work: asyncio.Task[Any]) -> None:
        self._admission.leave(self, self._queue)
        error = None if work.cancelled() else work.exception()
        unheard = self._closed and not self._outlives_request
        if isinstance(error, Exception) and unheard and unforeseen(error):
            log.error("what a client left behind failed", exc_info=error)


class Admission:
    """Admits at most ``running`` requests whose trees grow and ``queued`` more that wait. Their
    bodies may have ``most_bytes`` bytes together, and those of one key half of that."""

    def __init__(
        self,
        running: int,
        queued: int,
        retry_after: int,
        most_bytes: int = 1 << 62,
        waited: Callable[[float], None] = lambda _: None,
    ) -> None:
        """``waited`` is called with the seconds that each slot waited, admitted or not."""
        self.waited = waited
        self._most_running = running
        self._most_open = running + queued
        self._most_bytes = most_bytes
        self._retry_after = retry_after
        self.queues: dict[str, KeyQueue] = {}
        self._numbers = 0
        self._now = 0.0
        self.open = 0
        self.bytes = 0
        self.running = 0

    @property
    def waiting(self) -> int:
        """The number of slots whose tree may not grow yet."""
        return self.open - self.running

    def take(self, key: ApiKey, size: int = 0) -> QueueSlot:
        """Take a place for a request with a body of ``size`` bytes. Raises ApiError (429) when all
        places are taken, or all that this key may have."""
        queue = self.queues.setdefault(key.name, KeyQueue(key))
        if self.open >= self._most_open:
            raise self._refusal("queue_full", "the queue is full")
        if queue.open >= min(key.running, self._most_running) + key.queued:
            raise self._refusal("rate_limit_exceeded", "this key has too many requests open")
        if self.bytes + size > self._most_bytes:
            raise self._refusal("queue_full", "the bodies of open requests are too large together")
        if queue.bytes + size > max(self._most_bytes // 2, size):
            message = "the bodies of this key's open requests are too large together"
            raise self._refusal("rate_limit_exceeded", message)
        self.open += 1
        self.bytes += size
        queue.open += 1
        queue.bytes += size
        self._numbers += 1
        return QueueSlot(self, queue, self._numbers, size)

    def wait(self, slot: QueueSlot, queue: KeyQueue) -> None:
        """Append a slot to its key's queue."""
        if not queue.waiting:
            queue.next_start = max(queue.next_start, self._now)
        queue.waiting.append(slot)
        self._serve()

    def leave(self, slot: QueueSlot, queue: KeyQueue) -> None:
        """Give a slot back, whether its tree runs, waits or has not asked for its turn."""
        self.open -= 1
        self.bytes -= slot.size
        queue.open -= 1
        queue.bytes -= slot.size
        if slot.granted:
            self.running -= 1
            queue.running -= 1
            self._serve()
        elif slot in queue.waiting:
            queue.waiting.remove(slot)

    def _serve(self) -> None:
        while self.running < self._most_running:
            ready = [s for s in self.queues.values() if s.waiting and s.running < s.key.running]
            if not ready:
                return
            queue = min(ready, key=lambda s: (s.next_start, s.waiting[0].number))
            self._now = max(self._now, queue.next_start)
            queue.next_start += 1 / queue.key.weight
            queue.running += 1
            self.running += 1
            queue.waiting.popleft().grant()

    def _refusal(self, code: str, why: str) -> ApiError:
        headers = {"retry-after": str(self._retry_after)}
        message = f"{why}; come back in {self._retry_after} s"
        return ApiError(429, code, message, headers=headers)


def queue_timeout(seconds: float) -> ApiError:
    """The ApiError (504) for a request whose deadline came while it was in the queue."""
    message = f"the deadline of {seconds:g} s came while the request waited in the queue"
    return ApiError(504, "deadline_exceeded", message, headers={"x-should-retry": "false"})


async def seconds_after_turn(slot: QueueSlot | None, seconds: float) -> float:
    """Wait for the slot's turn, if there is a slot; return what then remains of ``seconds``."""
    if slot is None:
        return seconds
    start = time.monotonic()
    await slot.turn(seconds)
    return max(0.0, seconds - (time.monotonic() - start))
