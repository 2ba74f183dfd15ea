"""The embedded engine without its pipe: one search at a time, in this process.

Scheduler, scorer and caches are the engine's own. The models are loaded once; scheduler and scorer
are made for every search, so that each can have KV budgets and a KV policy of its own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import torch

from runtime.embedded.judge_scorer import JudgeScorer
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.reward_scorer import RewardScorer, load_reward_model
from runtime.embedded.scheduler import Scheduler, scheduler_for
from runtime.embedders.lexical import embed_texts
from runtime.reward_reader import overhead_of
from runtime.text import Text
from search.counters import Counters, Usage
from search.engine import Branch, Capabilities, Hint, Sampling, Step, Trajectory


class ModelsInProcess:
    """A policy and a reward model, loaded once. Raises ValueError without a reward model."""

    def __init__(self, options: EngineOptions) -> None:
        torch.set_num_threads(options.cores)
        self.options = options
        self.text = Text(options.policy)
        self.policy = Forward(
            options.policy, exact=options.exact, threads=options.cores, kernel=options.kernel
        )
        scoring = load_reward_model(options)
        if scoring is None:
            raise ValueError(f"prm: {options.prm}; a reward model is needed")
        self.prm, self.reader = scoring
        self.capabilities = Capabilities(
            engine="in process",
            models={},
            exact=options.exact,
            scores=True,
            embeds="lexical",
            context_tokens=self.text.context,
            fingerprint="",
            score_tokens=overhead_of(self.reader.paths),
        )


@dataclass(slots=True)
class Clocked:
    """A model whose passes are timed. ``again_seconds``: the time of rows without logits,
    which are computed again, except in the first pass, which reads the prompt. ``spans``: the
    sequences that had a place in a pass, summed over all passes."""

    forward: Forward
    clock: Callable[[], float] = time.perf_counter
    seconds: float = 0.0
    again_seconds: float = 0.0
    passes: int = 0
    spans: int = 0

    def new_store(self, slots: int) -> Any:
        """A KV store of the model."""
        return self.forward.new_store(slots)

    def run(self, spans: Sequence[Span], store: Any) -> torch.Tensor:
        """Run one pass of the model and time it."""
        before = self.clock()
        logits = self.forward.run(spans, store)
        elapsed = self.clock() - before
        rows = sum(len(span.tokens) for span in spans)
        again = sum(span.logits_from for span in spans)
        self.passes += 1
        self.spans += len(spans)
        self.seconds += elapsed
        if self.passes > 1:
            self.again_seconds += elapsed * again / rows
        return logits


class SteppedEngine:
    """The base of engines that step a scheduler and a scorer in this process, for one search at
    a time."""

    def __init__(
        self, capabilities: Capabilities, scheduler: Scheduler, scorer: RewardScorer | JudgeScorer
    ) -> None:
        self.capabilities = capabilities
        self.scheduler = scheduler
        self._scorer = scorer
        self._calls = count(1)

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Lexical embeddings of each trajectory's last step."""
        return embed_texts([trajectory.texts[-1] for trajectory in trajectories])

    def hint(self, tree: str, hint: Hint) -> None:
        """Pass a hint on to both models' caches."""
        self.scheduler.hint(tree, hint)
        self._scorer.hint(tree, hint)

    async def release(self, tree: str) -> Counters:
        """Release a tree and return what it cost."""
        prm = self._scorer.release(tree) or Counters()
        return (self.scheduler.release(tree) or Counters()) + prm

    async def abort(self, tree: str) -> Counters:
        """Stop a tree and release it."""
        self.scheduler.abort(tree)
        self._scorer.abort(tree)
        return await self.release(tree)

    async def usage(self) -> Usage:
        """Nothing: the caller reads the caches itself."""
        return Usage()

    async def health(self) -> None:
        """Always healthy: it runs in its caller's process."""

    async def close(self) -> None:
        """Nothing to stop."""


class InProcess(SteppedEngine):
    """An engine for one search.

    ``seconds``: the time spent in ``expand`` and in ``score``, by ``clock``.
    """

    def __init__(
        self,
        models: ModelsInProcess,
        clock: Callable[[], float] = time.perf_counter,
        **changes: object,
    ) -> None:
        """``changes`` are EngineOptions of this search alone.

        ``rounds``: how many were drawn; ``longest``: tokens of its longest path with its next step.
        """
        options = replace(models.options, **changes)  # type: ignore[arg-type]
        self.clocked = Clocked(models.policy, clock)
        self.scorer = RewardScorer(options, models.prm, models.prm.config, models.reader)
        scheduler = scheduler_for(options, self.clocked, models.policy.config)
        super().__init__(models.capabilities, scheduler, self.scorer)
        self.rounds = 0
        self.longest = 0
        self.seconds = {"expand": 0.0, "score": 0.0}
        self._lookahead = options.lookahead
        self._clock = clock

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch."""
        call = next(self._calls)
        with self._timed("expand"):
            self.scheduler.expand(call, tree, branches, sampling)
            while True:
                expansions = self.scheduler.step()
                if expansions:
                    break
                for failed in self.scheduler.errors.take():
                    raise failed.error
        self.rounds += 1
        self.longest = max([self.longest, *(len(b.tokens) + b.limit for b in branches)])
        return expansions[0].steps

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Score each trajectory."""
        call = next(self._calls)
        with self._timed("score"):
            extension = self.scheduler.beam_extension
            ahead = extension.finished_next_steps(tree, trajectories) if self._lookahead else {}
            self.scorer.score(call, tree, prompt, question, trajectories, ahead)
            return self.read()[call]

    def read(self) -> dict[int, list[float]]:
        """Run the reward model until nothing remains to be read; rewards by call."""
        rewards: dict[int, list[float]] = {}
        while self.scorer.busy:
            rewards |= dict(self.scorer.step())
        return rewards

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        start = self._clock()
        yield
        self.seconds[call] += self._clock() - start
