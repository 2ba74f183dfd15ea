"""Scores trajectories: on the reward model's servers, or on the policy's where they judge."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.accounting import Flops, sum_of_contexts
from runtime.judge import Judge
from runtime.reward_format import Paths, RewardFormat
from runtime.reward_reader import Softmax, classes_share, paths_of, sigmoid
from runtime.sglang.fleet import Fleet
from runtime.sglang.replica import Json, Replica
from runtime.sglang.search_session import Path, SearchSession
from runtime.sglang.step_request import PathRead
from runtime.sglang.step_sampler import StepSampler
from runtime.text import Text
from search.engine import Branch, EngineError, PrefixTooLong, RewardMissing, Trajectory
from search.tree import ROOT


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """How a server is asked for a path's reward, and how its answer becomes one.

    A path, spelt by ``paths``, is read at its last token, with nothing sampled.

    With a ``softmax`` the server gives the log-probabilities of its two verdicts. Without, the raw
    outputs of its own head: one is a value, read over ``scale``, of several ``label`` is taken.
    """

    paths: Paths
    softmax: Softmax | None = None
    label: int = 0
    several: bool = False
    scale: float = 1.0

    @classmethod
    def of(cls, form: RewardFormat, text: Text, policy: Text) -> RewardRequest:
        """For a reward model's ``text`` beside the policy's.

        Raises RewardMissing for a tag or a verdict that is not there, or that SGLang does not give.
        """
        if form.reads == "softmax":
            return cls(paths_of(form, text, policy), Softmax.of(form, text))
        if form.reads in ("value", "classes"):
            several = form.reads == "classes"
            paths = paths_of(form, text, policy)
            return cls(paths, label=form.label, several=several, scale=form.scale)
        raise RewardMissing(
            f"reward_format {form.name!r}: reads {form.reads!r}; SGLang gives log-probabilities, "
            "which do not hold the mean logit: use the embedded engine, or serve the model as a "
            "classifier"
        )

    def body(self, path: Path, note: Mapping[str, Any]) -> dict[str, Any]:
        """The body that asks ``/generate`` for a path's verdicts; ``note``: what a server with our
        plug-in is told.

        ``logprob_start_len`` -1 reads the last position alone: all before it may come from cache.
        """
        assert self.softmax is not None, "other heads are asked by /classify"
        return {
            "input_ids": list(path),
            "return_logprob": True,
            "logprob_start_len": -1,
            "token_ids_logprob": [self.softmax.good, self.softmax.bad],
            "sampling_params": {"max_new_tokens": 0, **note},
        }

    def trial(self) -> tuple[str, dict[str, Any]]:
        """A path and a body that a server must be able to answer, whatever it serves."""
        if self.softmax is None:
            return "/classify", {"input_ids": [[0]]}
        return "/generate", self.body((0,), {})

    def reward(self, answer: Json) -> float:
        """In [0, 1]. Raises EngineError for an answer that does not hold it."""
        if self.softmax is not None:
            positions = answer["meta_info"].get("output_token_ids_logprobs") or [[]]
            by_id = {token: logprob for logprob, token, *_ in positions[0]}
            try:
                return self.softmax.share(by_id[self.softmax.good], by_id[self.softmax.bad])
            except KeyError:
                raise EngineError("SGLang gave no log-probabilities of the verdicts") from None
        outputs = answer["embedding"]
        if self.several != (len(outputs) > max(1, self.label)):
            wanted = f"more than {max(1, self.label)} outputs" if self.several else "one output"
            raise EngineError(
                f"the reward server's head has {len(outputs)} outputs; {wanted} needed"
            )
        if self.several:
            return classes_share(outputs, self.label)
        return sigmoid(outputs[0] / self.scale)


class PrmScorer:
    """A prefill of the new tokens a path, with nothing drawn, read at its last token."""

    def __init__(self, fleet: Fleet, request: RewardRequest, *, context: int, flops: Flops) -> None:
        """``context``: most tokens of a path."""
        self.fleet = fleet
        self._request = request
        self._context = context
        self._flops = flops

    async def score(
        self, search: SearchSession, prompt: Path, question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """One reward a trajectory. What all their paths begin with is read once before them."""
        paths = self._request.paths
        read = [paths.path(prompt, question, t, search.spelt) for t in trajectories]
        for path in read:
            if len(path) > self._context:
                raise PrefixTooLong(
                    f"a trajectory of {len(path)} tokens does not fit the reward model's context "
                    f"of {self._context}"
                )
        opening = tuple(paths.opening(prompt, question, search.spelt))
        if len(read) > 1 and opening and opening not in search.openings:
            await search.together([self._ask(search, prompt, [opening], len(opening), [None])])
            search.openings.add(opening)
        steps = [_step(search, trajectory) for trajectory in trajectories]
        (answers,) = await search.together([self._ask(search, prompt, read, len(opening), steps)])
        search.costs.counters.model_calls += bool(answers)
        return [self._request.reward(answer) for answer in answers]

    async def _ask(
        self,
        search: SearchSession,
        prompt: Path,
        paths: Sequence[Path],
        opening: int,
        steps: Sequence[tuple[int, int] | None],
    ) -> list[Json]:
        """The answers for all paths, in order: one request."""

        async def ask(replica: Replica) -> list[Json]:
            if self._request.softmax is None:
                return await self._classify(search, replica, paths)
            answers: dict[int, Json] = {}
            bodies = [
                self._request.body(path, search.notes.on(replica, opening, step))
                for path, step in zip(paths, steps, strict=True)
            ]
            await search.send_list(replica, bodies, answers.__setitem__)
            return [answers[place] for place in range(len(paths))]

        answers = await self.fleet.ask(search.tree, prompt, ask) if paths else []
        for path, answer in zip(paths, answers, strict=True):
            cached = int(answer["meta_info"].get("cached_tokens") or 0)
            fresh = len(path) - cached
            search.costs.counters.prm_tokens += fresh
            search.costs.counters.flops += self._flops(fresh, sum_of_contexts(cached, fresh), 1)
        return answers

    @staticmethod
    async def _classify(
        search: SearchSession, replica: Replica, paths: Sequence[Path]
    ) -> list[Json]:
        with search.request_list(replica, [0] * len(paths)) as rids:
            return await replica.classify({"rid": rids, "input_ids": list(map(list, paths))})


def _step(search: SearchSession, trajectory: Trajectory) -> tuple[int, int] | None:
    """A trajectory's node and its parent's, which was scored before; None if it was not."""
    search.scored.setdefault(trajectory.steps, trajectory.node)
    above = trajectory.steps[:-1]
    parent = search.scored.get(above) if above else ROOT
    return None if parent is None or parent >= trajectory.node else (trajectory.node, parent)


class PolicyJudge:
    """Asks the policy itself, by a judge's template."""

    def __init__(self, sampler: StepSampler, judge: Judge) -> None:
        self._sampler = sampler
        self._judge = judge

    async def score(
        self, search: SearchSession, prompt: Path, question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """One reward a trajectory; the verdicts' tokens are not the search's steps."""
        del prompt  # the judge's template has one of its own
        judge, judged = self._judge, search.apart()
        branches = [branch for t in trajectories for branch in self._votes(question, t)]
        drawings = await self._sampler.sample(judged, branches, judge.sampling)
        texts = [judge.text.decode(d.tokens, d.branch.tokens) for d in drawings]
        votes, spent = judge.form.votes, judged.costs.counters
        ruled = [judge.judge(texts[i : i + votes]) for i in range(0, len(texts), votes)]
        search.costs.counters.unparsed_verdicts += sum(judgement.unparsed for judgement in ruled)
        search.costs.counters.prm_tokens += spent.prefilled_tokens + spent.decoded_tokens
        search.costs.counters.flops += spent.flops
        search.costs.counters.model_calls += max((len(d.tokens) for d in drawings), default=0)
        return [judgement.reward for judgement in ruled]

    def _votes(self, question: str, trajectory: Trajectory) -> list[Branch]:
        judge, node = self._judge, trajectory.node
        prompt, limit = judge.prompt(question, trajectory), judge.form.verdict_tokens
        return [
            Branch(node, vote, prompt, seed, limit, -1)
            for vote, seed in enumerate(judge.seeds(trajectory))
        ]


class LikelihoodScorer:
    """exp of the policy's mean log-probability a token; steps drawn elsewhere are read."""

    def __init__(self, sampler: StepSampler) -> None:
        self._sampler = sampler

    async def score(
        self, search: SearchSession, prompt: Path, question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """One reward a trajectory; ``question`` is in the prompt."""
        del question
        search.prompt = search.prompt or prompt
        paths = [_path(prompt, trajectory.steps) for trajectory in trajectories]
        sums: dict[Path, tuple[float, int]] = {}
        for path, trajectory in zip(paths, trajectories, strict=True):
            known = _known(search, prompt, trajectory.steps)
            sums |= {} if known is None else {path: known}
        unknown = [path for path in paths if path not in sums]
        reads = [PathRead(path, len(prompt) - 1) for path in unknown]
        (answers,) = await search.together([self._sampler.read(search, reads)])
        sums |= zip(unknown, map(_sum_of, answers), strict=True)
        return [math.exp(total / tokens) for total, tokens in map(sums.__getitem__, paths)]


def _path(prompt: Path, steps: Sequence[Path]) -> Path:
    return (*prompt, *(token for step in steps for token in step))


def _known(search: SearchSession, prompt: Path, steps: Sequence[Path]) -> tuple[float, int] | None:
    """The sum of log-probabilities of steps drawn here and their tokens; None if one was not."""
    path, total, tokens = prompt, 0.0, 0
    for step in steps:
        path = (*path, *step)
        known = search.logprobs.get(path)
        if known is None:
            return None
        total, tokens = total + known[0], tokens + known[1]
    return total, tokens


def _sum_of(answer: Json) -> tuple[float, int]:
    read = answer["meta_info"]["input_token_logprobs"]
    logprobs = [logprob for logprob, *_ in read if logprob is not None]
    return math.fsum(logprobs), len(logprobs)
