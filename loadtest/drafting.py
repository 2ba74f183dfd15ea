"""One way to decode, in this process, so that the target's every moment can be watched.

The policy model generates and, as its own judge, evaluates; each part is timed apart. Ways share
the weights of the target, so many of them fit side by side and take turns.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from loadtest.in_process import Clocked, SteppedEngine
from loadtest.rejection_sampling import rejecting_scheduler
from runtime.embedded.judge_scorer import load_judge
from runtime.embedded.options import EngineOptions
from runtime.embedded.scheduler import scheduler_for
from runtime.text import Text
from search.engine import Branch, Capabilities, Sampling, Step, Trajectory

GENERATOR, EVALUATOR = "generator", "evaluator"


@dataclass(slots=True)
class Part:
    """What the generator or the evaluator did: tokens drawn in ``seconds``, for ``busy`` of which
    the target ran, in ``passes`` (a branch's each); ``accepted`` of ``tested`` draws were
    foreseen."""

    seconds: float = 0.0
    busy: float = 0.0
    counts: Counter[str] = field(default_factory=Counter)

    @property
    def rate(self) -> float:
        """Tokens a second."""
        return self.counts["tokens"] / self.seconds if self.seconds else 0.0


class DraftedEngine(SteppedEngine):
    """An engine whose drafts are timed."""

    def __init__(self, target: Clocked, options: EngineOptions, *, rejects: bool = False) -> None:
        """``options`` of an engine whose policy is the target's checkpoint; the policy judges.
        ``rejects``: drafts are accepted by rejection, so trees are others."""
        self.parts = {GENERATOR: Part(), EVALUATOR: Part()}
        self._target = target
        make = rejecting_scheduler if rejects else scheduler_for
        scheduler = make(options, target, target.forward.config, target.clock)
        judge = load_judge(replace(options, reward_format="generative"), scheduler)
        assert judge is not None, "the format asks a judge"
        self._judge = judge
        can = Capabilities(
            engine="embedded",
            models={"policy": str(options.policy)},
            exact=options.same_trees and not rejects,
            scores=True,
            embeds=None,
            context_tokens=Text(options.policy).context,
            fingerprint="",
            score_tokens=judge.overhead,
        )
        super().__init__(can, scheduler, self._judge)

    def start(self) -> None:
        """Count from here."""
        self.parts = {GENERATOR: Part(), EVALUATOR: Part()}

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch."""
        call = next(self._calls)
        return self._timed(GENERATOR, lambda: self.scheduler.expand(call, tree, branches, sampling))

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Have every trajectory judged."""
        del prompt
        call = next(self._calls)
        return self._timed(EVALUATOR, lambda: self._judge.score(call, tree, question, trajectories))

    def _timed(self, name: str, ask: Any) -> Any:
        """Ask the scheduler for a call and step until it is answered."""
        part, before, clock = self.parts[name], self._counts(), self._target.clock
        start, busy = clock(), self._target.seconds
        ask()
        answer = None
        while answer is None:
            for expansion in self.scheduler.step():
                rewards = self._judge.rule(expansion)
                answer = expansion.steps if rewards is None else rewards
        part.seconds += clock() - start
        part.busy += self._target.seconds - busy
        part.counts += self._counts() - before
        return answer

    def _counts(self) -> Counter[str]:
        total = self.scheduler.totals()
        return Counter(
            tokens=total.decoded_tokens,
            passes=total.target_passes,
            tested=total.tested_tokens,
            accepted=total.accepted_tokens,
        )
