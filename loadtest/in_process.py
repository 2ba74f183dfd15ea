"""The embedded engine without its pipe: one search at a time, looked at after every step.

Scheduler, scorer and caches are the engine's own. The models are loaded once and a scheduler is
made for every search, so that each can have a KV budget and a KV policy of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from loadtest.replayed import Recorded
from runtime.embedded.drawing.scheduler import Scheduler
from runtime.embedded.model.forward import Forward, Span
from runtime.embedded.options import EngineOptions
from runtime.embedded.scoring.scorers import load_scorer
from runtime.embedded.worker import scheduler_for
from runtime.text import Text
from search.engine import (
    Branch,
    Capabilities,
    EngineError,
    Hint,
    KvFull,
    Sampling,
    Step,
    Trajectory,
    TreeCost,
    Usage,
)


class Models:
    """A policy and a reward model, loaded once. Raises ValueError without a reward model."""

    def __init__(self, options: EngineOptions) -> None:
        torch.set_num_threads(options.cores)
        self.options = options
        self.text = Text(options.policy)
        self.policy = Forward(options.policy, exact=options.exact, threads=options.cores)
        scoring = load_scorer(options)
        if scoring is None:
            raise ValueError(f"prm: {options.prm}; a reward model is needed")
        self.scorer, overhead = scoring
        self.capabilities = Capabilities(
            engine="in process",
            models={},
            exact=options.exact,
            scores=True,
            embeds=None,
            context_tokens=self.text.context,
            fingerprint="",
            score_tokens=overhead,
        )


@dataclass(slots=True)
class Clocked:
    """A model whose passes are timed. ``again_seconds`` is the part of those rows that were no
    tokens to go on from: what was computed again, once the prompt has been read."""

    forward: Forward
    seconds: float = 0.0
    again_seconds: float = 0.0
    passes: int = 0

    def new_store(self, slots: int) -> Any:
        """As the model's."""
        return self.forward.new_store(slots)

    def run(self, spans: Sequence[Span], store: Any) -> torch.Tensor:
        """As the model's."""
        before = time.perf_counter()
        logits = self.forward.run(spans, store)
        took = time.perf_counter() - before
        rows = sum(len(span.tokens) for span in spans)
        again = sum(span.logits_from for span in spans)
        self.passes += 1
        self.seconds += took
        if self.passes > 1:
            self.again_seconds += took * again / rows
        return logits


class InProcess:
    """An engine for one search, step by step. ``watch`` sees the scheduler after each."""

    def __init__(
        self,
        models: Models,
        watch: Callable[[Scheduler], None] = lambda _: None,
        **changes: object,
    ) -> None:
        """``changes`` are EngineOptions of this search alone; ``rounds`` records it."""
        options = replace(models.options, **changes)  # type: ignore[arg-type]
        self.capabilities = models.capabilities
        self.clocked = Clocked(models.policy)
        self.scheduler = scheduler_for(options, self.clocked, models.policy.config)
        self.rounds: list[Recorded] = []
        self._scorer = models.scorer
        self._watch = watch
        self._calls = count(1)
        self._hint = Hint()

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch."""
        call = next(self._calls)
        self.scheduler.expand(call, tree, branches, sampling)
        while True:
            done = self.scheduler.step()
            self._watch(self.scheduler)
            if done:
                steps = tuple(done[0].steps)
                self.rounds.append(Recorded(self._hint, tuple(branches), sampling, steps))
                self._hint = Hint()
                return done[0].steps
            if self.scheduler.starved():
                raise KvFull(f"kv_tokens: {self.scheduler.cache.capacity} are all held")

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One reward a trajectory."""
        self._scorer.score(next(self._calls), tree, prompt, question, trajectories)
        while True:
            done = self._scorer.step()
            if done:
                return done[0].rewards

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Nothing embeds here."""
        raise EngineError("embed: nothing embeds in process")

    def hint(self, tree: str, hint: Hint) -> None:
        """Tell both models' caches."""
        self._hint = hint
        self.scheduler.hint(tree, hint)
        self._scorer.hint(tree, hint)

    async def release(self, tree: str) -> TreeCost:
        """Let go of a tree; what it cost the policy model."""
        self._scorer.release(tree)
        account = self.scheduler.release(tree)
        if account is None:
            return TreeCost()
        return TreeCost(
            decoded_tokens=account.decoded_tokens,
            prefilled_tokens=account.prefilled_tokens,
            cached_tokens=account.cached_tokens,
            model_calls=account.passes,
            flops=account.flops,
            kv_tokens_peak=account.peak,
            rehydrated_tokens=account.rehydrated_tokens,
            rehydrations=account.rehydrations,
        )

    async def abort(self, tree: str) -> None:
        """Stop a tree and let go of it."""
        self.scheduler.abort(tree)
        self._scorer.abort(tree)
        await self.release(tree)

    async def usage(self) -> Usage:
        """KV by now."""
        cache = self.scheduler.cache
        return Usage(
            kv_tokens_active=cache.active_tokens,
            kv_tokens_cached=cache.cached_tokens,
            kv_tokens_capacity=cache.capacity,
            kv_tokens_peak=cache.active_peak,
            prm_kv_tokens_active=0,
            prm_kv_tokens_cached=0,
            prm_kv_tokens_capacity=0,
            running=self.scheduler.running,
            waiting=self.scheduler.waiting,
            decoded_tokens_total=0,
            prefilled_tokens_total=0,
            cached_tokens_total=0,
            prm_tokens_total=0,
            evicted_tokens_total=cache.evicted_tokens,
        )

    async def health(self) -> None:
        """It lives as long as its caller."""

    async def close(self) -> None:
        """Nothing is to be stopped."""
