"""Scores trajectories on the reward model's servers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from runtime.accounting import Flops, sum_of_contexts
from runtime.reward_format import RewardFormat
from runtime.reward_reader import Paths, Softmax, outputs_misfit, outputs_reward, paths_of
from runtime.servers.fleet import Fleet
from runtime.sglang.replica import Json, Replica
from runtime.sglang.search_session import Path, SearchSession
from runtime.text import Text
from search.engine import EngineError, PrefixTooLong, RewardMissing, Trajectory
from search.tree import ROOT


@dataclass(frozen=True, slots=True)
class PathScore:
    """A path to score. ``step``: its node and parent, if a server is told of them.

    ``next_path``: the path with a next step that was drawn early, which is scored along with it.
    A server with our plug-in learns of the node from its children then: the request goes past it.
    """

    path: Path
    step: tuple[int, int] | None = None
    next_path: Path | None = None


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """Makes requests for rewards of paths, and reads rewards from their answers.

    A path, spelt by ``paths``, is read at its last token, with nothing sampled.

    With a ``softmax`` the server gives the log-probabilities of the two verdicts, else the raw
    outputs of the model's own head.
    """

    paths: Paths
    form: RewardFormat
    softmax: Softmax | None = None

    @classmethod
    def of(cls, form: RewardFormat, text: Text, policy: Text) -> RewardRequest:
        """The request for a reward model with this ``text`` beside the policy's.

        Raises RewardMissing for a tag or a verdict it lacks, or a format that SGLang cannot give.
        """
        if form.reads == "softmax":
            return cls(paths_of(form, text, policy), form, Softmax.of(form, text))
        if form.reads_hidden:
            return cls(paths_of(form, text, policy), form)
        raise RewardMissing(
            f"reward_format {form.name!r}: reads {form.reads!r}; SGLang gives log-probabilities, "
            "which do not hold the mean logit: use the embedded engine, or serve the model as a "
            "classifier"
        )

    def body(self, target: PathScore, note: Mapping[str, Any]) -> dict[str, Any]:
        """The body that asks ``/generate`` for a path's verdicts; ``note``: sampling parameters for
        our plug-in.

        ``logprob_start_len`` -1 reads only the last position: all before it may come from cache.
        With a next step it is the path's last position: SGLang returns that and all later ones.
        """
        assert self.softmax is not None, "other heads are asked by /classify"
        return {
            "input_ids": list(target.next_path or target.path),
            "return_logprob": True,
            "logprob_start_len": len(target.path) - 1 if target.next_path else -1,
            "token_ids_logprob": [self.softmax.good, self.softmax.bad],
            "sampling_params": {"max_new_tokens": 0, **note},
        }

    def trial(self) -> tuple[str, dict[str, Any]]:
        """A trial request: a URL path and a body that every server of the kind can answer."""
        if self.softmax is None:
            return "/classify", {"input_ids": [[0]]}
        return "/generate", self.body(PathScore((0,)), {})

    def reward(self, answer: Json) -> float:
        """The reward in [0, 1]. Raises EngineError for an answer without it."""
        if self.softmax is not None:
            return self._share(answer["meta_info"].get("output_token_ids_logprobs"), 0)
        outputs = answer["embedding"]
        if misfit := outputs_misfit(len(outputs), self.form):
            raise EngineError(f"the reward server's head has {misfit}")
        return outputs_reward(outputs, self.form)

    def reward_before(self, answer: Json) -> float:
        """The reward of a path that was read with its next step, at the path's own end."""
        return self._share(answer["meta_info"].get("input_token_ids_logprobs"), 1)

    def _share(self, positions: Sequence[Any] | None, place: int) -> float:
        """The reward from the verdicts' log-probabilities at one of these positions."""
        assert self.softmax is not None, "other heads give outputs"
        logprobs = positions[place] if positions and len(positions) > place else ()
        by_id = {token: logprob for logprob, token, *_ in logprobs}
        try:
            return self.softmax.share(by_id[self.softmax.good], by_id[self.softmax.bad])
        except KeyError:
            raise EngineError("SGLang gave no log-probabilities of the verdicts") from None


NextSteps = Callable[[SearchSession, Sequence[Trajectory]], Mapping[int, Trajectory]]
"""Returns, by node, the trajectories extended by a next step that was drawn early."""


class PrmScorer:
    """Scores each path by a prefill of its new tokens, read at its last token."""

    def __init__(
        self,
        fleet: Fleet[Replica],
        request: RewardRequest,
        *,
        context: int,
        flops: Flops,
        next_steps: NextSteps | None = None,
    ) -> None:
        """``context``: most tokens of a path; ``next_steps``: finds next steps to score before a
        round asks for them, with the step before (FlashTTS, section 4.1.2)."""
        self.fleet = fleet
        self._request = request
        self._context = context
        self._flops = flops
        self._next_steps = next_steps

    async def score(
        self, search: SearchSession, prompt: Path, question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """One reward a trajectory. An opening that all paths share is read once before them."""
        speller = self._request.paths
        paths = [speller.path(prompt, question, t, search.spelt) for t in trajectories]
        for path in paths:
            if len(path) > self._context:
                raise PrefixTooLong(
                    f"a trajectory of {len(path)} tokens does not fit the reward model's context "
                    f"of {self._context}"
                )
        opening = tuple(speller.opening(prompt, question, search.spelt))
        steps = [_step(search, trajectory) for trajectory in trajectories]
        later = self._next_paths(search, prompt, question, trajectories)
        unread = {
            place: _looking_ahead(path, step, later.get(trajectory.node))
            for place, (path, step, trajectory) in enumerate(
                zip(paths, steps, trajectories, strict=True)
            )
            if path not in search.early_rewards
        }
        if len(unread) > 1 and opening and opening not in search.openings:
            targets = [PathScore(opening)]
            await search.together([self._ask(search, prompt, targets, len(opening))])
            search.openings.add(opening)
        targets = list(unread.values())
        (rewards,) = await search.together([self._ask(search, prompt, targets, len(opening))])
        search.costs.counters.model_calls += bool(targets)
        fresh = dict(zip(unread, rewards, strict=True))
        return [
            fresh[place] if place in fresh else search.early_rewards[path]
            for place, path in enumerate(paths)
        ]

    def _next_paths(
        self, search: SearchSession, prompt: Path, question: str, trajectories: Sequence[Trajectory]
    ) -> dict[int, Path]:
        """By node: its path with a next step that was drawn early, if it fits the context."""
        longer = self._next_steps(search, trajectories) if self._next_steps else {}
        spell = self._request.paths.path
        paths = {node: spell(prompt, question, t, search.spelt) for node, t in longer.items()}
        return {node: path for node, path in paths.items() if len(path) <= self._context}

    async def _ask(
        self, search: SearchSession, prompt: Path, targets: Sequence[PathScore], opening: int
    ) -> list[float]:
        """The rewards of all paths, in order, by one request; keeps those of next steps."""

        async def ask(replica: Replica) -> list[Json]:
            if self._request.softmax is None:
                return await self._classify(search, replica, [*whole, *later])
            answers: dict[int, Json] = {}
            bodies = [
                self._request.body(target, search.notes.on(replica, opening, target.step))
                for target in targets
            ]
            await search.send_list(replica, bodies, answers.__setitem__)
            return [answers[place] for place in range(len(targets))]

        whole = [target.path for target in targets]
        later = [target.next_path for target in targets if target.next_path]
        answers = await self.fleet.ask(search.tree, prompt, ask) if targets else []
        if self._request.softmax is None:
            self._count(search, [*whole, *later], answers)
            rewards = list(map(self._request.reward, answers))
            search.early_rewards |= zip(later, rewards[len(targets) :], strict=True)
            return rewards[: len(targets)]
        self._count(search, [target.next_path or target.path for target in targets], answers)
        return [self._take(search, *pair) for pair in zip(targets, answers, strict=True)]

    def _take(self, search: SearchSession, target: PathScore, answer: Json) -> float:
        """A path's reward; keeps that of its next step in ``early_rewards``."""
        if target.next_path is None:
            return self._request.reward(answer)
        search.early_rewards[target.next_path] = self._request.reward(answer)
        return self._request.reward_before(answer)

    def _count(self, search: SearchSession, paths: Sequence[Path], answers: Sequence[Json]) -> None:
        for path, answer in zip(paths, answers, strict=True):
            cached = int(answer["meta_info"].get("cached_tokens") or 0)
            fresh = len(path) - cached
            search.costs.counters.prm_tokens += fresh
            search.costs.counters.flops += self._flops(fresh, sum_of_contexts(cached, fresh), 1)

    @staticmethod
    async def _classify(
        search: SearchSession, replica: Replica, paths: Sequence[Path]
    ) -> list[Json]:
        with search.request_list(replica, [0] * len(paths)) as rids:
            return await replica.classify({"rid": rids, "input_ids": list(map(list, paths))})


def _looking_ahead(path: Path, step: tuple[int, int] | None, later: Path | None) -> PathScore:
    """A ``PathScore`` with the next step if ``later`` continues ``path``, else without."""
    if later is None or len(later) <= len(path) or later[: len(path)] != path:
        return PathScore(path, step)
    return PathScore(path, None, later)


def _step(search: SearchSession, trajectory: Trajectory) -> tuple[int, int] | None:
    """A trajectory's node and its parent; None if the parent was not scored before."""
    search.scored.setdefault(trajectory.steps, trajectory.node)
    above = trajectory.steps[:-1]
    parent = search.scored.get(above) if above else ROOT
    return None if parent is None or parent >= trajectory.node else (trajectory.node, parent)
