"""Rewards that the policy itself gives, on any kind of servers: as a judge, or by likelihood."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Generic, TypeVar

from runtime.judge import Judge
from runtime.servers.policy_sampler import PolicySampler
from runtime.servers.request_costs import Path
from runtime.servers.served_search import ServedSearch
from search.engine import Branch, Trajectory

S = TypeVar("S", bound=ServedSearch)


class PolicyJudge(Generic[S]):
    """Has the policy judge trajectories, by a judge's template."""

    def __init__(self, sampler: PolicySampler[S, Any], judge: Judge) -> None:
        self.verdicts = 0
        """How many verdicts it gave."""
        self._sampler = sampler
        self._judge = judge

    async def score(
        self, search: S, prompt: Path, question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """One reward a trajectory; the verdicts do not become steps of the search."""
        del prompt  # the judge's template makes its own prompt
        judge, verdict_search = self._judge, search.apart()
        branches = [branch for t in trajectories for branch in self._votes(question, t)]
        verdicts = await self._sampler.sample(verdict_search, branches, judge.sampling)
        texts = [judge.text.decode(d.tokens, d.branch.tokens) for d in verdicts]
        self.verdicts += len(texts)
        votes, counters = judge.form.votes, verdict_search.costs.counters
        judgements = [judge.judge(texts[i : i + votes]) for i in range(0, len(texts), votes)]
        search.costs.counters.unparsed_verdicts += sum(j.unparsed for j in judgements)
        search.costs.counters.prm_tokens += counters.prefilled_tokens + counters.decoded_tokens
        search.costs.counters.flops += counters.flops
        search.costs.counters.model_calls += max((len(d.tokens) for d in verdicts), default=0)
        return [judgement.reward for judgement in judgements]

    def _votes(self, question: str, trajectory: Trajectory) -> list[Branch]:
        judge, node = self._judge, trajectory.node
        prompt, limit = judge.prompt(question, trajectory), judge.form.verdict_tokens
        return [
            Branch(node, vote, prompt, seed, limit, -1)
            for vote, seed in enumerate(judge.seeds(trajectory))
        ]


class LikelihoodScorer(Generic[S]):
    """exp of the policy's mean log-probability a token; only steps not drawn here are read."""

    def __init__(self, sampler: PolicySampler[S, Any]) -> None:
        self._sampler = sampler

    async def score(
        self, search: S, prompt: Path, question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """One reward a trajectory; ``question`` is unused, since the prompt holds it."""
        del question
        search.prompt = search.prompt or prompt
        paths = [_path(prompt, trajectory.steps) for trajectory in trajectories]
        sums: dict[Path, tuple[float, int]] = {}
        for path, trajectory in zip(paths, trajectories, strict=True):
            entry = _total(search, prompt, trajectory.steps)
            sums |= {} if entry is None else {path: entry}
        unknown = [path for path in paths if path not in sums]
        new_sums = await self._sampler.sum_logprobs(search, unknown, len(prompt))
        sums |= zip(unknown, new_sums, strict=True)
        return [math.exp(total / tokens) for total, tokens in map(sums.__getitem__, paths)]


def _path(prompt: Path, steps: Sequence[Path]) -> Path:
    return (*prompt, *(token for step in steps for token in step))


def _total(search: ServedSearch, prompt: Path, steps: Sequence[Path]) -> tuple[float, int] | None:
    """Sum of log-probabilities and tokens of ``steps``; None if one was not drawn here."""
    path, total, tokens = prompt, 0.0, 0
    for step in steps:
        path = (*path, *step)
        entry = search.logprobs.get(path)
        if entry is None:
            return None
        total, tokens = total + entry[0], tokens + entry[1]
    return total, tokens
