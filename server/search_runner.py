"""Runs all searches, plain completions and scorings of a model, and keeps track of them."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from search.context_limit import context_for
from search.controller import search
from search.engine import Engine
from search.events import Event
from search.outcome import Outcome
from search.problem import Problem
from search.spec import AnswerRule, SearchSpec
from server.admission import QueueSlot
from server.api_errors import Deleted, Stopped
from server.continuation import Continuation, ContinuedEngine
from server.plain_completion import PlainCompletion, PlainReply, complete
from server.prometheus_metrics import Metrics
from server.reply_text import answers_to, split_reasoning
from server.scoring import ReplySteps, Rewards, score_replies

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True, slots=True)
class Silence:
    """Yielded by ``follow`` when nothing has happened for a while."""


@dataclass(frozen=True, slots=True)
class WorkDone(Generic[R]):
    """The last item that ``follow`` yields, with the work's return value."""

    value: R


log = logging.getLogger("hedgerow.search")

PLAIN, SCORE = "plain", "score"
"""Labels of the metric ``policy`` for plain completions and for scoring."""


class SearchRunner:
    """Runs trees on one engine, counts them in the metrics, and can cancel those that run."""

    def __init__(
        self,
        engine: Engine,
        metrics: Metrics,
        answers: AnswerRule = "auto",
        search: Callable[..., Awaitable[Outcome]] = search,
        complete: Callable[..., Awaitable[PlainReply]] = complete,
        score: Callable[..., Awaitable[list[Rewards]]] = score_replies,
    ) -> None:
        """``search``, ``complete`` and ``score``: the functions to call, or traced ones."""
        self.engine = engine
        self._search = search
        self._complete = complete
        self._score = score
        self._answers: AnswerRule = answers
        self.metrics = metrics
        self._running: dict[asyncio.Task[Any], QueueSlot] = {}
        self._closing = False
        self._embedder_fault_logged = False

    def start(
        self, work: Coroutine[Any, Any, T], slot: QueueSlot, *, outlives_request: bool = False
    ) -> asyncio.Task[T]:
        """Run ``work`` as the task that holds the slot's place; cancelling the task frees its tree.

        The task outlives its request only if ``outlives_request`` is true.
        """
        task = slot.start(work, outlives_request=outlives_request)
        self._running[task] = slot
        task.add_done_callback(self._running.pop)
        return task

    async def run(self, work: Coroutine[Any, Any, T], slot: QueueSlot) -> T:
        """Run a request's ``work`` in its slot and return its result.

        Raises Deleted or Stopped if the work was cancelled, but not by its own client.
        """
        task = self.start(work, slot)
        await asyncio.wait({task})
        if task.cancelled():
            raise self.cancelled()
        return task.result()

    async def follow(
        self,
        work: Callable[[Callable[[T], None]], Coroutine[Any, Any, R]],
        slot: QueueSlot,
        quiet_seconds: float,
    ) -> AsyncIterator[T | Silence | WorkDone[R]]:
        """Run ``work(tell)`` in a request's slot; yield what it passes to ``tell``, Silence after
        every ``quiet_seconds`` without an item, and WorkDone last. Raises what ``run`` raises.
        """
        items: asyncio.Queue[T | None] = asyncio.Queue()
        task = self.start(work(items.put_nowait), slot)
        task.add_done_callback(lambda _: items.put_nowait(None))
        while True:
            try:
                async with asyncio.timeout(quiet_seconds):
                    item = await items.get()
            except TimeoutError:
                yield Silence()
                continue
            if item is None:
                break
            yield item
        if task.cancelled():
            raise self.cancelled()
        yield WorkDone(task.result())

    @property
    def under_way(self) -> int:
        """The number of tasks that run."""
        return len(self._running)

    def cancelled(self) -> Deleted | Stopped:
        """The exception for a task that was cancelled, but not by its own client."""
        return Stopped() if self._closing else Deleted()

    async def search(
        self,
        tree_id: str,
        problem: Problem,
        spec: SearchSpec,
        *,
        seconds: float,
        listen: Callable[[Event], None] | None = None,
        continuation: Continuation | None = None,
        in_reasoning: bool = False,
        engine: Engine | None = None,
    ) -> Outcome:
        """Grow one tree for at most ``seconds``, on this runner's engine or a wrapper ``engine``.

        ``continuation``: the steps to continue from, which ``problem.prompt`` ends with.
        ``in_reasoning``: the prompt opens a thought. Answers are not looked for in thoughts.
        """
        before = continuation.text if continuation else ""
        engine = engine or self.engine
        if continuation:
            engine = ContinuedEngine(engine, continuation)
        answers = answers_to(problem.question, spec.answers or self._answers)
        with self.metrics.in_flight_of(spec.policy):
            outcome = await self._search(
                problem,
                spec,
                engine,
                tree_id=tree_id,
                answer_of=lambda text: answers.of(
                    split_reasoning(before + text, opened=in_reasoning)[1]
                ),
                same_answer=answers.same,
                clock=time.monotonic,
                deadline=time.monotonic() + seconds,
                listen=listen,
                context_tokens=context_for(spec, self.engine.capabilities),
            )
        self.metrics.count_search(outcome)
        fault = outcome.stats.embedder_fault
        if (
            fault is not None and not self._embedder_fault_logged
        ):  # each is counted and is in its reply's stats
            self._embedder_fault_logged = True
            log.warning("%s: such searches go on without comparing steps", fault)
        if answers.maths is not None:
            self.metrics.unread_answers.inc(answers.maths.unread)
        return outcome

    async def complete(
        self,
        tree_id: str,
        request: PlainCompletion,
        on_text: Callable[[str], None] = lambda _: None,
        engine: Engine | None = None,
    ) -> PlainReply:
        """Draw a plain completion, on this runner's engine or a wrapper ``engine``."""
        with self.metrics.in_flight_of(PLAIN):
            reply = await self._complete(request, engine or self.engine, tree_id, on_text)
        self.metrics.searches.labels(PLAIN, reply.finish_reason).inc()
        self.metrics.generated.inc(reply.tokens)
        self.metrics.kept.inc(reply.tokens)
        return reply

    async def score(
        self,
        replies: Sequence[ReplySteps],
        tree_id: str,
        *,
        seed: int,
        seconds: float,
        on_scored: Callable[[int], None],
    ) -> list[Rewards]:
        """The rewards of a client's steps; ``on_scored`` as in ``score_replies``."""
        with self.metrics.in_flight_of(SCORE):
            by_reply = await self._score(
                replies, self.engine, tree_id, seed=seed, seconds=seconds, on_scored=on_scored
            )
        self.metrics.searches.labels(SCORE, "scored").inc()
        rewards = [reward for of_reply in by_reply for reward in of_reply if reward is not None]
        self.metrics.scores.inc(len(rewards))
        return by_reply

    async def close(self) -> None:
        """Cancel all tasks and wait until they have released their trees."""
        self._closing = True
        for slot in tuple(self._running.values()):
            slot.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)
