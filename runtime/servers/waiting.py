"""Reports what a start waits for, waits before retries, and words for failed requests."""

from __future__ import annotations

import asyncio
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, TypeVar

import httpx

T = TypeVar("T")

FIRST_SECONDS = 0.5
"""Seconds until the first report: a server that is there already answers sooner."""
REPORT_SECONDS = 10.0
"""Seconds between two reports of one wait."""
FIRST_WAIT, LONGEST_WAIT = 0.1, 3.2
"""Seconds until a full server is asked again: the first and the longest wait."""


def full_waits(seconds: float) -> Iterator[float]:
    """Growing waits between attempts at a full server, ``seconds`` in total. A search whose
    deadline is sooner is cancelled before the last."""
    wait = FIRST_WAIT
    while seconds > 0:
        yield min(wait, seconds)
        seconds -= wait
        wait = min(2 * wait, LONGEST_WAIT)


def retry_after(response: httpx.Response, wait: float) -> float:
    """Seconds until a full server wants to be asked again; ``wait`` if it does not say."""
    header = response.headers.get("retry-after", "")
    return float(header) if header.isdecimal() else wait


async def report_while(work: Coroutine[Any, Any, T], say: Callable[[float], None]) -> T:
    """The result of ``work``; until it is there ``say`` is called with the seconds elapsed."""
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
    """Why there was no answer, in words: the operating system's if it has some."""
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
    """Whether what answers there does not speak HTTP, or only one of both sides speaks TLS."""
    garbled = isinstance(error, httpx.RemoteProtocolError) and "disconnected" not in str(error)
    return garbled or any(
        isinstance(cause, ssl.SSLError) and not isinstance(cause, ssl.SSLWantReadError)
        for cause in _causes(error)
    )


def _causes(error: BaseException) -> Iterator[BaseException]:
    """An error, its chain of causes, and the members of exception groups among them."""
    cause: BaseException | None = error
    while cause is not None:
        yield cause
        if isinstance(cause, BaseExceptionGroup):
            yield from cause.exceptions
        cause = cause.__cause__ or cause.__context__
