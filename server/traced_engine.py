"""One search's engine, with a span around each call and around each round of calls."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from opentelemetry.context import Context
from opentelemetry.trace import Span, Tracer, set_span_in_context

from runtime.passed_on import PassedOn
from search.engine import Branch, Engine, EngineError, Hint, Sampling, Step, Trajectory, Usage
from search.events import Event, Evicted, Pruned, Rehydrated, Selected

NANOSECONDS = 1e9


class TracedEngine(PassedOn):
    """An engine for one tree. ``whole``: the span of its search; ``model``: the policy's name.

    The search decides from the last thing it told (``hear``) of one round, or from its embeddings
    on, until it gives the hint of the next. Between a round's steps and what it tells of them it
    may embed as well as score.
    """

    def __init__(self, engine: Engine, tracer: Tracer, whole: Span, model: str) -> None:
        super().__init__(engine)
        self._tracer = tracer
        self._whole = set_span_in_context(whole)
        self._model = model
        self._round: Span | None = None
        self._number = 0
        self._heard = time.time_ns()
        self._deciding_from: int | None = None
        self._drawn = False

    def hear(self, event: Event) -> None:
        """The search told of something. A plan is told as it is made, before the hint."""
        if isinstance(event, Selected | Pruned) and event.round > self._number:
            self._begin()
        if isinstance(event, Evicted | Rehydrated) and self._round is not None:
            about = {"hedgerow.node": event.node, "hedgerow.kv.tokens_kept": event.kept}
            self._round.add_event(event.name, about)
        self._drawn = False
        self._heard = time.time_ns()

    def end(self) -> None:
        """The search is over."""
        if self._round is not None:
            self._round.end(self._heard)
            self._round = None

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """As the engine does; what it evicted and rehydrated meanwhile hangs below."""
        about = {
            "gen_ai.operation.name": "text_completion",
            "gen_ai.request.model": self._model,
            "gen_ai.request.temperature": sampling.temperature,
            "gen_ai.request.top_p": sampling.top_p,
            "hedgerow.branches": len(branches),
        }
        before = await self._usage()
        with self._call("expand", about) as span:
            steps = await self._engine.expand(tree, branches, sampling)
            span.set_attribute("gen_ai.usage.output_tokens", sum(len(s.tokens) for s in steps))
            after = await self._usage()
            if before is not None and after is not None:
                self._kv_work(set_span_in_context(span), before, after)
        self._drawn = True
        return steps

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """As the engine does."""
        about = {"gen_ai.operation.name": "score", "hedgerow.trajectories": len(trajectories)}
        with self._call("score", about):
            return await self._engine.score(tree, prompt, question, trajectories)

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """As the engine does; beside a round's scores, or the first call of a round."""
        beside = self._drawn
        if not beside:
            self._begin()
        about = {"gen_ai.operation.name": "embeddings", "hedgerow.steps": len(trajectories)}
        with self._call("embed", about):
            vectors = await self._engine.embed(tree, prompt, trajectories)
        if not beside:
            self._deciding_from = time.time_ns()
        return vectors

    def hint(self, tree: str, hint: Hint) -> None:
        """As the engine does; the round is decided."""
        self._begin()
        assert self._round is not None, "a round has begun"
        self._number += 1
        self._round.set_attribute("hedgerow.round", self._number)
        decide = self._tracer.start_span("decide", self._parent(), start_time=self._deciding_from)
        decide.end()
        self._deciding_from = None
        self._engine.hint(tree, hint)

    def _begin(self) -> None:
        """A new round, unless it has begun already."""
        if self._deciding_from is None:
            self.end()
            self._round = self._tracer.start_span("round", self._whole, start_time=self._heard)
            self._deciding_from = self._heard

    def _parent(self) -> Context:
        return self._whole if self._round is None else set_span_in_context(self._round)

    @contextmanager
    def _call(self, name: str, about: dict[str, Any]) -> Iterator[Span]:
        """A span below the round, or below the whole where nothing goes by rounds."""
        with self._tracer.start_as_current_span(name, self._parent(), attributes=about) as span:
            yield span

    async def _usage(self) -> Usage | None:
        with suppress(EngineError):
            return await self._engine.usage()
        return None

    def _kv_work(self, parent: Context, before: Usage, after: Usage) -> None:
        """What the engine gave up and brought back during a call, for this search or another."""
        now = time.time_ns()
        evicted = after.totals.evicted_tokens - before.totals.evicted_tokens
        if evicted > 0:
            took = after.totals.kv_policy_seconds - before.totals.kv_policy_seconds
            began = now - int(took * NANOSECONDS)
            about = {"hedgerow.kv.tokens": evicted}
            self._tracer.start_span("evict", parent, attributes=about, start_time=began).end(now)
        rehydrated = after.totals.rehydrated_tokens - before.totals.rehydrated_tokens
        if rehydrated > 0:
            about = {"hedgerow.kv.tokens": rehydrated}
            span = self._tracer.start_span("rehydrate", parent, attributes=about, start_time=now)
            span.end(now)
