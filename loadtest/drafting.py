"""One way to decode, in this process, so that the target's every moment can be watched.

The policy model generates and, as its own judge, evaluates; each part is timed apart. Ways share
the weights of the target, so many of them fit side by side and take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from loadtest.rejection_sampling import rejecting_scheduler
from runtime.embedded.judge_scorer import JudgeScorer, load_judge
from runtime.embedded.model.batch_plan import KVStore, Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.scheduler import scheduler_for
from runtime.text import Text
from search.counters import Counters
from search.engine import Branch, Capabilities, EngineError, Hint, Sampling, Step, Trajectory

GENERATOR, EVALUATOR = "generator", "evaluator"


class TimedForward:
    """A target's forward that notes how long it ran."""

    def __init__(self, forward: Forward, clock: Callable[[], float]) -> None:
        self.forward = forward
        self.clock = clock
        self.seconds = 0.0

    def new_store(self, slots: int) -> KVStore:
        """Room for keys and values."""
        return self.forward.new_store(slots)

    def run(self, spans: Sequence[Span], store: KVStore) -> torch.Tensor:
        """A pass."""
        start = self.clock()
        logits = self.forward.run(spans, store)
        self.seconds += self.clock() - start
        return logits


@dataclass(slots=True)
class Part:
    """What the generator or the evaluator did: tokens drawn in ``seconds``, for ``busy`` of which
    the target ran, in ``passes`` (a branch's each); ``accepted`` of ``tested`` draws were foreseen.
    ``idle`` holds the target's idle share of every round, as time goes by."""

    seconds: float = 0.0
    busy: float = 0.0
    idle: list[float] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.counts["tokens"] / self.seconds if self.seconds else 0.0


class DraftedEngine:
    """An engine that runs one search at a time."""

    def __init__(
        self, target: TimedForward, options: EngineOptions, *, rejects: bool = False
    ) -> None:
        """``options`` of an engine whose policy is the target's checkpoint; the policy judges.
        ``rejects``: drafts are accepted by rejection, so trees are others."""
        self.parts = {GENERATOR: Part(), EVALUATOR: Part()}
        self._target, self._options = target, options
        make = rejecting_scheduler if rejects else scheduler_for
        self._scheduler = make(options, target, target.forward.config, target.clock)
        judging = load_judge(replace(options, reward_format="generative"), self._scheduler)
        assert judging is not None, "the format asks a judge"
        self._judge: JudgeScorer = judging[0]
        self.capabilities = Capabilities(
            engine="embedded",
            models={"policy": str(options.policy)},
            exact=options.same_trees and not rejects,
            scores=True,
            embeds=None,
            context_tokens=Text(options.policy).context,
            fingerprint="",
            score_tokens=judging[1],
        )
        self._calls = 0

    def start(self) -> None:
        """Count from here."""
        self.parts = {GENERATOR: Part(), EVALUATOR: Part()}

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch."""
        self._calls += 1
        return self._timed(
            GENERATOR, lambda: self._scheduler.expand(self._calls, tree, branches, sampling)
        )

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Have every trajectory judged."""
        del prompt
        self._calls += 1
        return self._timed(
            EVALUATOR, lambda: self._judge.score(self._calls, tree, question, trajectories)
        )

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Nothing here needs it."""
        return self._refuse("embed", tree, prompt, trajectories)

    def hint(self, tree: str, hint: Hint) -> None:
        """Free what was pruned."""
        self._scheduler.hint(tree, hint)
        self._judge.hint(tree, hint)

    async def release(self, tree: str) -> Counters:
        """Let go of a tree."""
        self._scheduler.abort(tree)
        self._judge.abort(tree)
        self._judge.release(tree)
        cost = self._scheduler.release(tree) or Counters()
        return Counters(decoded_tokens=cost.decoded_tokens, prefilled_tokens=cost.prefilled_tokens)

    async def abort(self, tree: str) -> None:
        """Let go of a tree."""
        await self.release(tree)

    async def usage(self) -> NoReturn:
        """Nothing here needs it."""
        self._refuse("usage")

    async def health(self) -> None:
        """It is alive while this process is."""

    async def close(self) -> None:
        """There is nothing to stop."""

    @staticmethod
    def _refuse(name: str, *_: object) -> NoReturn:
        raise EngineError(f"{name}: is not part of this benchmark")

    def _timed(self, name: str, ask: Any) -> Any:
        """Ask the scheduler for a call and step until it is answered."""
        part, before, clock = self.parts[name], self._counts(), self._target.clock
        start, busy = clock(), self._target.seconds
        ask()
        answer = None
        while answer is None:
            for drawn in self._scheduler.step():
                ruled = self._judge.rule(drawn)
                answer = ruled.rewards if ruled else drawn.steps
        seconds, busy = clock() - start, self._target.seconds - busy
        part.seconds += seconds
        part.busy += busy
        part.idle.append(1 - busy / seconds)
        part.counts += self._counts() - before
        return answer

    def _counts(self) -> Counter[str]:
        total = self._scheduler.totals()
        return Counter(
            tokens=total.decoded_tokens,
            passes=total.target_passes,
            drafted=total.drafted_tokens,
            tested=total.tested_tokens,
            accepted=total.accepted_tokens,
        )
