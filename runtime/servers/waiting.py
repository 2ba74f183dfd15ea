"""Nobody waits in silence: what a start waits for is said at once, and now and then."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

FIRST_SECONDS = 0.5
"""What is there already answers sooner: nothing is said of it."""
REPORT_SECONDS = 10.0
"""Between two lines of one wait."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 3.2
"""Until a server that is full is asked again."""


def full_waits(seconds: float) -> Iterator[float]:
    """Between attempts at a server that is full, ever longer, ``seconds`` in all. A search whose
    deadline is sooner does not wait for the last."""
    wait = FIRST_WAIT
    while seconds > 0:
        yield min(wait, seconds)
        seconds -= wait
        wait = min(2 * wait, LONGEST_WAIT)


def retry_after(response: httpx.Response, wait: float) -> float:
    """Seconds until a full server wants to be asked again; ``wait`` where it says nothing."""
    header = response.headers.get("retry-after", "")
    return float(header) if header.isdecimal() else wait


async def report_while(work: Coroutine[Any, Any, T], say: Callable[[float], None]) -> T:
    """What ``work`` gives; while it is at work ``say`` is called with the seconds it has taken."""
    start = time.monotonic()
    task = asyncio.create_task(work)
    pause = FIRST_SECONDS
    try:
        while not (await asyncio.wait({task}, timeout=pause))[0]:
            say(time.monotonic() - start)
            pause = REPORT_SECONDS
    finally:
        if not task.done():
            task.cancel()
            await asyncio.wait({task})
    return task.result()


def reason_of(error: httpx.HTTPError) -> str:
    """Why nothing came back, in words: the system's own where it has some."""
    if isinstance(error, httpx.ConnectTimeout):
        return "no connection in time"
    if isinstance(error, httpx.TimeoutException):
        return "no answer in time"
    for cause in _causes(error):
        if isinstance(cause, ConnectionRefusedError):
            return "connection refused"
        if isinstance(cause, OSError) and cause.strerror:
            return cause.strerror
    return str(error) or type(error).__name__


def speaks_otherwise(error: httpx.HTTPError) -> bool:
    """Whether something answers there that speaks no HTTP, or TLS where we do not, or we alone."""
    garbled = isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error)
    return garbled or any(
        isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLWantReadError)
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, what it came from, and the parts of groups among that."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            yield from cause.exceptions
        cause = cause.__cause__ or cause.__context__
