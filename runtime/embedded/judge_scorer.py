"""Score trajectories by asking the policy itself: verdicts are decoded like steps, beside them.

A search's verdicts run under a tree name of their own, so that they do not count as its steps.
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
    """The search behind a tree's name on the scheduler, be it the search's own or its judge's."""
    return tree.removesuffix(_JUDGED)


class JudgeScorer:
    """The judge's calls on the policy's scheduler."""

    def __init__(self, scheduler: Scheduler, judge: Judge) -> None:
        self.past = Counters()
        self.verdicts = 0
        self._scheduler = scheduler
        self._judge = judge
        self.overhead = judge.overhead()
        """Tokens of a judge's prompt and verdict beyond the path's: once, and for each step."""
        self._calls: dict[int, tuple[str, list[int]]] = {}

    def score(
        self, call_id: int, tree: str, question: str, trajectories: Sequence[Trajectory]
    ) -> None:
        """Begin to score trajectories. Raises EngineError if a prompt and verdict do not fit."""
        sampling = self._judge.sampling
        branches = [branch for t in trajectories for branch in self._votes(question, t)]
        try:
            self._scheduler.expand(call_id, tree + _JUDGED, branches, sampling, foreign=True)
        except PrefixTooLong as error:
            raise PrefixTooLong(f"judge: {error}") from None
        self._calls[call_id] = tree, [branch.node for branch in branches]

    def rule(self, result: ExpandResult) -> list[float] | None:
        """The rewards of a finished call; None if it is not a call of the judge."""
        call = self._calls.pop(result.call, None)
        if call is None:
            return None
        tree, nodes = call
        self._scheduler.hint(tree + _JUDGED, Hint(dead=tuple(nodes)))
        votes, texts = self._judge.form.votes, [step.text for step in result.steps]
        judgements = [self._judge.judge(texts[i : i + votes]) for i in range(0, len(texts), votes)]
        counters = self._scheduler.searches[tree + _JUDGED].counters
        counters.unparsed_verdicts += sum(judgement.unparsed for judgement in judgements)
        self.verdicts += len(texts)
        return [judgement.reward for judgement in judgements]

    def _votes(self, question: str, trajectory: Trajectory) -> list[Branch]:
        """A branch for each vote. Its prompt lives as long as the node; the verdict's node id is
        negative, so that no node has it, and dies when the call is over."""
        judge, node = self._judge, trajectory.node
        prompt, limit = judge.prompt(question, trajectory), judge.form.verdict_tokens
        return [
            Branch(node, vote, prompt, seed, limit, -(node * judge.form.votes + vote) - 1)
            for vote, seed in enumerate(judge.seeds(trajectory))
        ]

    def hint(self, tree: str, hint: Hint) -> None:
        """Free the judge's prompts for nodes that the search has pruned."""
        self._scheduler.hint(tree + _JUDGED, hint)

    def abort(self, tree: str) -> list[int]:
        """Stop judging for a search; the ids of the calls that get no answer."""
        self._calls = {id: call for id, call in self._calls.items() if call[0] != tree}
        return self._scheduler.abort(tree + _JUDGED)

    def release(self, tree: str) -> Counters | None:
        """Release a search; what judging cost, None if nothing of it was judged."""
        counters = self._scheduler.release(tree + _JUDGED)
        if counters is None:
            return None
        self.past += counters
        return cost_of_judging(counters)

    def totals(self) -> Counters:
        """What all judging, past and present, has cost; the scheduler's totals contain it."""
        searches = self._scheduler.searches
        judge_searches = {tree: searches[tree] for tree in searches if tree.endswith(_JUDGED)}
        return total_of(self.past, judge_searches)


def cost_of_judging(counters: Counters) -> Counters:
    """What judging costs a search: decoded verdict tokens count as scoring, not as its steps'."""
    decoded = counters.decoded_tokens - counters.deduplicated_tokens
    return Counters(
        prm_tokens=counters.prefilled_tokens + decoded,
        model_calls=counters.model_calls,
        flops=counters.flops,
        unparsed_verdicts=counters.unparsed_verdicts,
    )


def load_judge(options: EngineOptions, scheduler: Scheduler) -> JudgeScorer | None:
    """The policy as judge if the format is one. Raises ValueError if it cannot fit its context."""
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
