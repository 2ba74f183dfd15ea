"""Scores trajectories by asking the policy itself: verdicts are drawn like any step, beside them.

A search's verdicts have an account of their own, so that nothing of them counts as its steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from runtime.embedded.account import Account
from runtime.embedded.expand_call import ExpandResult
from runtime.embedded.reward_scorer import ScoreResult
from runtime.embedded.scheduler import Scheduler
from runtime.judge import Judge
from search.engine import Branch, Hint, PrefixTooLong, Trajectory

_JUDGED = "\0judged"


def owner(tree: str) -> str:
    """The search that the scheduler knows by this name, or by this name judges for."""
    return tree.removesuffix(_JUDGED)


class JudgeScorer:
    """The judge's calls on the policy's scheduler."""

    def __init__(self, scheduler: Scheduler, judge: Judge) -> None:
        self.past = Account(0)
        self.verdicts = 0
        self.unparsed_verdicts = 0
        self._scheduler = scheduler
        self._judge = judge
        self._calls: dict[int, tuple[str, list[int]]] = {}
        self._unparsed = Counter[str]()

    def score(
        self, call_id: int, tree: str, question: str, trajectories: Sequence[Trajectory]
    ) -> None:
        """Take on trajectories. Raises EngineError if a prompt and its verdict do not fit."""
        sampling = self._judge.sampling
        branches = [branch for t in trajectories for branch in self._votes(question, t)]
        try:
            self._scheduler.expand(call_id, tree + _JUDGED, branches, sampling, fresh=True)
        except PrefixTooLong as error:
            raise PrefixTooLong(f"judge: {error}") from None
        self._calls[call_id] = tree, [branch.node for branch in branches]

    def rule(self, drawn: ExpandResult) -> ScoreResult | None:
        """The rewards that a finished call comes to; None for a call that is not the judge's."""
        asked = self._calls.pop(drawn.call, None)
        if asked is None:
            return None
        tree, names = asked
        self._scheduler.hint(tree + _JUDGED, Hint(dead=tuple(names)))
        votes, texts = self._judge.form.votes, [step.text for step in drawn.steps]
        ruled = [self._judge.judge(texts[i : i + votes]) for i in range(0, len(texts), votes)]
        unparsed = sum(judgement.unparsed for judgement in ruled)
        self._unparsed[tree] += unparsed
        self.unparsed_verdicts += unparsed
        self.verdicts += len(texts)
        return ScoreResult(drawn.call, [judgement.reward for judgement in ruled])

    def _votes(self, question: str, trajectory: Trajectory) -> list[Branch]:
        """A branch for each vote. Its prompt lives as long as the node, the verdict has a name
        that no node has, and goes when the call is over."""
        judge, node = self._judge, trajectory.node
        prompt, limit = judge.prompt(question, trajectory), judge.form.verdict_tokens
        return [
            Branch(node, vote, prompt, seed, limit, -(node * judge.form.votes + vote) - 1)
            for vote, seed in enumerate(judge.seeds(trajectory))
        ]

    def hint(self, tree: str, hint: Hint) -> None:
        """Free the prompts of what the search has pruned."""
        self._scheduler.hint(tree + _JUDGED, hint)

    def abort(self, tree: str) -> list[int]:
        """Stop judging for a search; the ids of the calls that get no answer."""
        self._calls = {call: asked for call, asked in self._calls.items() if asked[0] != tree}
        return self._scheduler.abort(tree + _JUDGED)

    def release(self, tree: str) -> tuple[Account | None, int]:
        """Let go of a search; what judging cost, and its verdicts without a number."""
        account = self._scheduler.release(tree + _JUDGED)
        if account is not None:
            self.past.charge(account)
        return account, self._unparsed.pop(tree, 0)

    def totals(self) -> Account:
        """The costs of all judging, past and present; the scheduler's totals hold them too."""
        sums = Account(0)
        sums.charge(self.past)
        for tree, account in self._scheduler.accounts.items():
            if tree.endswith(_JUDGED):
                sums.charge(account)
        return sums
