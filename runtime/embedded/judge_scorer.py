"""Scores trajectories by asking the policy itself: verdicts are drawn like any step, beside them.

A search's verdicts have an account of their own, so that nothing of them counts as its steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from runtime.accounting import total_of
from runtime.embedded.options import EngineOptions
from runtime.embedded.scheduler import Scheduler
from runtime.embedded.sequence import ExpandResult
from runtime.judge import Judge
from runtime.reward_format import reward_format
from runtime.text import Text
from search.counters import Counters
from search.engine import Branch, Hint, PrefixTooLong, Trajectory

_JUDGED = "\0judged"


def owner(tree: str) -> str:
    """The search that the scheduler knows by this name, or by this name judges for."""
    return tree.removesuffix(_JUDGED)


class JudgeScorer:
    """The judge's calls on the policy's scheduler."""

    def __init__(self, scheduler: Scheduler, judge: Judge) -> None:
        self.past = Counters()
        self.verdicts = 0
        self._scheduler = scheduler
        self._judge = judge
        self.overhead = judge.overhead()
        """Tokens of a prompt and its verdict beside the path's: once, and for every step."""
        self._calls: dict[int, tuple[str, list[int]]] = {}

    def score(
        self, call_id: int, tree: str, question: str, trajectories: Sequence[Trajectory]
    ) -> None:
        """Take on trajectories. Raises EngineError if a prompt and its verdict do not fit."""
        sampling = self._judge.sampling
        branches = [branch for t in trajectories for branch in self._votes(question, t)]
        try:
            self._scheduler.expand(call_id, tree + _JUDGED, branches, sampling, foreign=True)
        except PrefixTooLong as error:
            raise PrefixTooLong(f"judge: {error}") from None
        self._calls[call_id] = tree, [branch.node for branch in branches]

    def rule(self, result: ExpandResult) -> list[float] | None:
        """The rewards that a finished call comes to; None for a call that is not the judge's."""
        asked = self._calls.pop(result.call, None)
        if asked is None:
            return None
        tree, names = asked
        self._scheduler.hint(tree + _JUDGED, Hint(dead=tuple(names)))
        votes, texts = self._judge.form.votes, [step.text for step in result.steps]
        ruled = [self._judge.judge(texts[i : i + votes]) for i in range(0, len(texts), votes)]
        counters = self._scheduler.searches[tree + _JUDGED].counters
        counters.unparsed_verdicts += sum(judgement.unparsed for judgement in ruled)
        self.verdicts += len(texts)
        return [judgement.reward for judgement in ruled]

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

    def release(self, tree: str) -> Counters | None:
        """Let go of a search; what judging cost, None if nothing of it was judged."""
        counters = self._scheduler.release(tree + _JUDGED)
        if counters is None:
            return None
        self.past += counters
        return cost_of_judging(counters)

    def totals(self) -> Counters:
        """What all judging, past and present, counted on the scheduler, whose totals hold it."""
        searches = self._scheduler.searches
        judged = {tree: searches[tree] for tree in searches if tree.endswith(_JUDGED)}
        return total_of(self.past, judged)


def cost_of_judging(counters: Counters) -> Counters:
    """What judging costs a search: what verdicts decode are no tokens of its steps."""
    decoded = counters.decoded_tokens - counters.deduplicated_tokens
    return Counters(
        prm_tokens=counters.prefilled_tokens + decoded,
        model_calls=counters.model_calls,
        flops=counters.flops,
        unparsed_verdicts=counters.unparsed_verdicts,
    )


def load_judge(options: EngineOptions, scheduler: Scheduler) -> JudgeScorer | None:
    """The policy as judge, if the format asks for one."""
    form = reward_format(options.reward_format)
    if form.reads != "judge":
        return None
    text = Text(options.policy)
    judge = JudgeScorer(scheduler, Judge(form, text))
    once, _ = judge.overhead
    if once >= text.context:
        raise ValueError(
            f"reward_format {form.name!r}: template and verdict_tokens take {once} tokens; the "
            f"context of {text.checkpoint} holds {text.context}"
        )
    return judge
