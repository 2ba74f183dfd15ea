"""The capacity model's claims about arrivals, measured on a server of its own process.

Fitted: the seconds and the KV of a search alone (one after the other), and the searches a second of
a full server (``MOST`` at once, all the time). Predicted from these: a closed loop in between; and,
of Poisson arrivals at shares of what the full server did, the mean number of searches under way,
the share of the time with any, seconds to the answer, KV in use, searches answered a second
(``loadtest/company.py``). Of the KV alone the model itself is judged (``Search.kv_tokens_mean``).

How many are under way is exact, by when each was asked and answered. KV is what ``/metrics`` says
every ``PERIOD``: what the engine held at its last word, which is as old as a round where a search
is alone, hence somewhat low there. ``played`` is what the same law says of the very arrivals that
came: how far it is from ``predicted`` is chance, and less the longer it is measured.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from statistics import mean
from types import TracebackType
from typing import Any, Self

import httpx

from loadtest.arrivals import paced, poisson
from loadtest.capacity import Search
from loadtest.company import (
    Law,
    SearchSpan,
    busy_share,
    company,
    law_through,
    mean_under_way,
    played,
)
from loadtest.metrics import values
from loadtest.served import Served
from models.tasks import TASKS

WIDTH = 8
TASK = "countdown"
MOST, BETWEEN = 16, 4
"""At once: on the full server, and in the closed loop that is predicted."""
SHARES = (0.3, 0.6)
"""Of what the full server does in a second."""
LEAST, COMING = 2, 12
"""Answers a caller of a closed loop, and arrivals in an open one, however slow the machine."""
PERIOD = 0.05
WARM = 0.1
"""Share of an open loop that is not measured: it begins with an empty server."""


@dataclass(frozen=True, slots=True)
class Seen:
    """A phase, on average over its time.

    ``rate``: arrivals a second. ``under_way``: asked and not answered, waiting or not. ``busy``:
    the share of the time with any. ``seconds``: from asked to answered, of those ``answered`` in
    it, so many a second. ``kv_tokens``: the policy model's.
    """

    rate: float
    under_way: float
    busy: float
    seconds: float
    kv_tokens: float
    answered: float


def seen(
    spans: Sequence[SearchSpan], samples: Sequence[tuple[float, float]], begin: float, end: float
) -> Seen:
    """What was measured between two times; ``samples``: a time and the KV tokens in use then.

    Raises ValueError if nothing was.
    """
    ended = [span for span in spans if begin < span.end <= end]
    held = [tokens for at, tokens in samples if begin < at <= end]
    if not ended or not held:
        raise ValueError(f"{len(ended)} searches and {len(held)} samples in {end - begin:.3g} s")
    return Seen(
        rate=sum(begin < span.begin <= end for span in spans) / (end - begin),
        under_way=mean_under_way(spans, begin, end),
        busy=busy_share(spans, begin, end),
        seconds=mean(span.end - span.begin for span in ended),
        kv_tokens=mean(held),
        answered=len(ended) / (end - begin),
    )


class Scrapes:
    """The policy model's active KV, every ``PERIOD`` for the length of an ``async with``."""

    def __init__(self, url: str) -> None:
        self._url = url
        self.samples: list[tuple[float, float]] = []

    async def __aenter__(self) -> Self:
        self._task = asyncio.create_task(self._scrape())
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._task.cancel()
        with suppress(asyncio.CancelledError):
            await self._task

    async def _scrape(self) -> None:
        async with httpx.AsyncClient(base_url=self._url) as client:
            began = time.perf_counter()
            while True:
                text = (await client.get("/metrics")).text
                now = time.perf_counter()
                active = values(text, "hedgerow_kv_tokens", model="policy", state="active")
                self.samples += [(now, tokens) for tokens in active]
                await asyncio.sleep(PERIOD - (now - began) % PERIOD)


class SearchLoad:
    """Small searches of one server, each with a question and a seed of its own in turn."""

    def __init__(self, url: str, samples: Sequence[tuple[float, float]]) -> None:
        self._client = httpx.AsyncClient(base_url=url, timeout=300)
        self._samples = samples
        self._questions = TASKS[TASK].questions("dev", 64)
        self._asked = 0
        self.stats: list[dict[str, Any]] = []
        """Of those answered by now, as their documents say it."""

    async def one(self) -> SearchSpan:
        """Raises RuntimeError if it is not answered."""
        self._asked += 1
        question = self._questions[self._asked % len(self._questions)]
        search = {"policy": "rebase", "width": WIDTH, "seed": self._asked}
        begin = time.perf_counter()
        answer = await self._client.post(
            "/v1/search", json={"question": question, "search": search}
        )
        if answer.status_code != 200:
            raise RuntimeError(f"a small search ended with {answer.status_code}: {answer.text}")
        span = SearchSpan(begin, time.perf_counter())
        self.stats.append(answer.json()["stats"])
        return span

    async def closed(self, at_once: int, seconds: float) -> Seen:
        """So many callers, each of whom asks again when answered.

        It is measured from when each has been answered once, since the first ones are in step, to
        the first answer after so many seconds and ``LEAST`` answers a caller.
        """
        spans: list[SearchSpan] = []
        fresh, answers, began, ended = at_once, 0, math.inf, math.inf

        async def caller() -> None:
            nonlocal fresh, answers, began, ended
            spans.append(await self.one())
            fresh -= 1
            if not fresh:
                began = time.perf_counter()
            while ended == math.inf:
                spans.append(await self.one())
                now = time.perf_counter()
                answers += now > began
                if now >= began + seconds and answers >= LEAST * at_once:
                    ended = min(now, ended)

        await asyncio.gather(*(caller() for _ in range(at_once)))
        return seen(spans, self._samples, began, ended)

    async def opened(self, arrivals: Sequence[float], seconds: float) -> Seen:
        """A search at each of these times, whatever becomes of the others."""
        begin = time.perf_counter()
        tasks = [asyncio.create_task(self.one()) async for _ in paced(arrivals)]
        await asyncio.sleep(max(0.0, begin + seconds - time.perf_counter()))
        spans = await asyncio.gather(*tasks)
        return seen(spans, self._samples, begin + WARM * seconds, begin + seconds)

    async def close(self) -> None:
        """Give up all connections."""
        await self._client.aclose()


def predicted(law: Law, kv_alone: float, rate: float) -> dict[str, float]:
    """What ``Seen`` holds of arrivals at a rate; ``kv_alone``: tokens of a search, over its time.

    Raises ValueError if the server cannot keep up.
    """
    found = company(law.rate, MOST, rate)
    return {
        "under_way": found.at_once + found.waiting,
        "busy": found.busy,
        "seconds": (found.at_once + found.waiting) / rate,
        "kv_tokens": found.at_once * kv_alone,
        "answered": rate,
    }


def of_these(law: Law, kv_alone: float, times: Sequence[float], seconds: float) -> dict[str, float]:
    """The same of the very arrivals."""
    begin = WARM * seconds
    spans = played(times, lambda n: n / law.rate(min(n, MOST)))
    ended = [span for span in spans if begin < span.end <= seconds]
    under_way = mean_under_way(spans, begin, seconds)
    return {
        "under_way": under_way,
        "busy": busy_share(spans, begin, seconds),
        "seconds": mean(span.end - span.begin for span in ended),
        "kv_tokens": under_way * kv_alone,
        "answered": len(ended) / (seconds - begin),
    }


def rows_of(
    load: str, measured: Seen, said: dict[str, float], by_chance: dict[str, float] | None = None
) -> list[dict[str, Any]]:
    """A row for each quantity that is predicted; ``error``: of the prediction, as a share of what
    was measured."""
    return [
        {
            "load": load,
            "rate": measured.rate,
            "what": what,
            "predicted": value,
            "measured": getattr(measured, what),
            "error": value / getattr(measured, what) - 1,
            "played": by_chance[what] if by_chance else None,
        }
        for what, value in said.items()
    ]


def grown(stats: Sequence[dict[str, Any]]) -> Search:
    """The capacity model's picture of these searches: only ``kept`` and ``spread`` are its own."""
    return Search(
        width=WIDTH,
        depth=mean(each["depth"] for each in stats),
        step=mean(each["generated_tokens"] / each["nodes"] for each in stats),
        prompt=mean(each["prompt_tokens"] for each in stats),
    )


async def load_check(quick: bool) -> dict[str, Any]:
    """``fitted`` and ``rows``. Raises RuntimeError if a search is not answered."""
    closed, opened = (3.0, 7.0) if quick else (15.0, 55.0)
    with Served(max_running=MOST, threads=1) as served:
        async with Scrapes(served.url) as scrapes:
            searches = SearchLoad(served.url, scrapes.samples)
            await searches.one()  # warm
            full = await searches.closed(MOST, closed)
            searches.stats.clear()
            alone = await searches.closed(1, closed)
            picture = grown(searches.stats)
            law = law_through(alone.answered, MOST, full.answered)
            rows = rows_of("alone", alone, {"kv_tokens": picture.kv_tokens_mean})
            between = await searches.closed(BETWEEN, closed)
            said = {"answered": law.rate(BETWEEN), "kv_tokens": BETWEEN * alone.kv_tokens}
            rows += rows_of(f"{BETWEEN} at once", between, said)
            for share in SHARES:
                rate = share * full.answered
                lasts = max(opened, COMING / rate)
                times = poisson(rate, lasts)
                found = await searches.opened(times, lasts)
                said = predicted(law, alone.kv_tokens, found.rate)
                chance = of_these(law, alone.kv_tokens, times, lasts)
                rows += rows_of(f"{share} of full", found, said, chance)
            await searches.close()
    fitted = {
        "seconds_alone": 1 / alone.answered,
        "kv_tokens_alone": alone.kv_tokens,
        "answered_full": full.answered,
        "at_once_full": MOST,
        "kv_tokens_full": full.kv_tokens,
        "fixed_seconds": law.fixed,
        "seconds_each": law.each,
        "depth": picture.depth,
        "step_tokens": picture.step,
        "prompt_tokens": picture.prompt,
        "kv_tokens_last_round": picture.kv_tokens,
    }
    return {"fitted": fitted, "rows": rows}
