"""An engine that decodes in one way, in this process, so that the target's time can be measured.

The policy model generates and, as its own judge, evaluates; each part is timed by itself. Engines
share the target's weights, so many of them fit side by side and take turns.
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
    """What the generator or the evaluator did: tokens drawn in ``seconds``, of which the target
    ran for ``busy``, in ``passes`` (counted per branch); ``accepted`` of the ``tested`` tokens were
    drafted right."""

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
        """``options``: their policy is the target's checkpoint, which also judges.
        ``rejects``: drafts are accepted by rejection sampling, so trees differ."""
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
        """Reset the counts."""
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
        """Let the policy judge every trajectory."""
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
