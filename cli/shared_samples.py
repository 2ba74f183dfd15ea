"""Lets several searches over one question share the draws that they have in common.

A step depends only on its prefix, seed, sampling and limit, a reward on its path, an embedding on
its step, so what one search has drawn another may reuse. What each search would have cost alone is
counted here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from runtime.accounting import Flops, no_flops, sum_of_contexts
from runtime.engine_wrapper import EngineWrapper
from search.counters import Counters
from search.engine import Branch, Engine, EngineError, Sampling, Step, Trajectory

T = TypeVar("T")
V = TypeVar("V")


@dataclass(slots=True)
class StandaloneCost:
    """Counts what one tree would cost alone, on a cold cache that never evicts.

    ``tag_tokens``: what the reward format adds to a step; a reward model with another tokenizer is
    assumed to need as many tokens as the policy for the rest.
    A forward pass (``model_calls``) draws one token of every branch of a round, or scores a round.
    """

    flops_of: Flops
    prm_flops_of: Flops
    embed_flops_of: Flops = no_flops
    tag_tokens: int = 1
    counters: Counters = field(default_factory=Counters)
    forked: set[tuple[int, ...]] = field(default_factory=set)
    read_paths: set[tuple[tuple[int, ...], ...]] = field(default_factory=set)
    embedded: set[tuple[int, ...]] = field(default_factory=set)

    def note_steps(self, branches: Sequence[Branch], steps: Sequence[Step]) -> None:
        """Count a round's steps; a step's last token is computed only when a child is drawn."""
        self.counters.model_calls += max((len(step.tokens) for step in steps), default=0)
        for branch, step in zip(branches, steps, strict=True):
            start, length = len(branch.tokens), len(step.tokens)
            self.counters.decoded_tokens += length
            self.counters.flops += self.flops_of(length - 1, sum_of_contexts(start, length - 1))
            if branch.tokens in self.forked:
                continue
            if not self.forked:
                self.counters.prefilled_tokens += start
                self.counters.flops += self.flops_of(start, sum_of_contexts(0, start), 1)
            else:
                self.counters.flops += self.flops_of(1, start)
            self.forked.add(branch.tokens)

    def scored(self, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]) -> None:
        """Count a round's rewards: the prompt and every step are read once."""
        self.counters.model_calls += bool(trajectories)
        for trajectory in trajectories:
            at = len(prompt)
            self._read((), 0, at)
            for n, step in enumerate(trajectory.steps, 1):
                size = len(step) + self.tag_tokens
                self._read(trajectory.steps[:n], at, size)
                at += size

    def compared(self, trajectories: Sequence[Trajectory]) -> None:
        """Count a round's embeddings: every distinct step is embedded once, by itself."""
        fresh = {trajectory.steps[-1] for trajectory in trajectories} - self.embedded
        self.embedded |= fresh
        sizes = [len(step) for step in fresh]
        self.counters.flops += self.embed_flops_of(
            sum(sizes), sum(sum_of_contexts(0, n) for n in sizes), 0
        )

    def _read(self, path: tuple[tuple[int, ...], ...], start: int, tokens: int) -> None:
        if path not in self.read_paths:
            self.read_paths.add(path)
            self.counters.prm_tokens += tokens
            self.counters.flops += self.prm_flops_of(
                tokens, sum_of_contexts(start, tokens), min(len(path), 1)
            )


class SharedSamples(EngineWrapper):
    """An ``Engine`` that shares another one among searches over one question; drop it after them.

    Equal requests in flight are merged. ``release`` returns what the tree would have cost alone.
    """

    def __init__(
        self,
        engine: Engine,
        flops: Flops = no_flops,
        prm_flops: Flops = no_flops,
        embed_flops: Flops = no_flops,
    ) -> None:
        super().__init__(engine)
        self._flops = flops, prm_flops, embed_flops
        self._steps: dict[Hashable, asyncio.Future[Step]] = {}
        self._rewards: dict[Hashable, asyncio.Future[float]] = {}
        self._vectors: dict[Hashable, asyncio.Future[tuple[float, ...]]] = {}
        self._costs: dict[str, StandaloneCost] = {}

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Return steps that are remembered, being drawn for another search, or drawn now."""
        steps = await _once(
            self._steps,
            branches,
            lambda branch: (branch.tokens, branch.seed, branch.limit, sampling),
            lambda missing: self._engine.expand(tree, missing, sampling),
        )
        self._cost(tree).note_steps(branches, steps)
        return steps

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Return rewards that are remembered, being scored for another search, or scored now."""
        rewards = await _once(
            self._rewards,
            trajectories,
            lambda trajectory: (prompt, question, trajectory.steps),
            lambda missing: self._engine.score(tree, prompt, question, missing),
        )
        self._cost(tree).scored(prompt, trajectories)
        return rewards

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Return vectors that are remembered, being made for another search, or made now."""
        vectors = await _once(
            self._vectors,
            trajectories,
            lambda trajectory: (trajectory.steps[-1], trajectory.texts[-1]),
            lambda missing: self._engine.embed(tree, prompt, missing),
        )
        self._cost(tree).compared(trajectories)
        return vectors

    async def release(self, tree: str) -> Counters:
        """Release the tree; return what it would have cost alone."""
        await super().release(tree)
        return self._costs.pop(tree, self._new_cost()).counters

    async def abort(self, tree: str) -> Counters:
        """Abort the tree; return what it would have cost alone."""
        await super().abort(tree)
        return self._costs.pop(tree, self._new_cost()).counters

    def _cost(self, tree: str) -> StandaloneCost:
        return self._costs.setdefault(tree, self._new_cost())

    def _new_cost(self) -> StandaloneCost:
        return StandaloneCost(*self._flops, tag_tokens=self.capabilities.score_tokens[1])


async def _once(
    cache: dict[Hashable, asyncio.Future[V]],
    items: Sequence[T],
    key: Callable[[T], Hashable],
    ask: Callable[[list[T]], Awaitable[list[V]]],
) -> list[V]:
    """A value for each of ``items``, calling ``ask`` only for those not in ``cache`` yet.

    If ``ask`` fails, all callers that wait for its values fail, and nothing is cached.
    """
    keys = [key(item) for item in items]
    missing = {k: item for k, item in zip(keys, items, strict=True) if k not in cache}
    loop = asyncio.get_running_loop()
    futures = {k: loop.create_future() for k in missing}
    cache |= futures
    try:
        values = await ask(list(missing.values())) if missing else []
    except BaseException as error:
        for k, future in futures.items():
            del cache[k]
            cause = error if isinstance(error, EngineError) else EngineError("its search ended")
            future.set_exception(cause)
            future.exception()  # mark it as retrieved: perhaps nobody waits for it
        raise
    for future, value in zip(futures.values(), values, strict=True):
        future.set_result(value)
    return [await cache[k] for k in keys]
