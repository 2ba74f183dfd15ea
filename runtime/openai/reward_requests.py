"""Requests for the rewards of paths, and how rewards are read from their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.openai.server_dialect import NAMED_ID
from runtime.reward_format import RewardFormat
from runtime.reward_reader import Paths, Softmax, outputs_misfit, outputs_reward, paths_of
from runtime.servers.request_costs import Path
from runtime.text import Text
from search.engine import EngineError, RewardMissing, Trajectory

Json = Mapping[str, Any]
TOP = 20
"""Likeliest tokens to ask for, to find the verdicts if ``logprob_token_ids`` is not supported."""
BIAS = 30.0
"""Added to both verdicts' logits. If the server's log-probabilities include it, both verdicts are
among the likeliest tokens; their difference stays the same."""


class PathsRequest(Protocol):
    """A request for several paths, read at their last tokens; drawn tokens are discarded."""

    @property
    def paths(self) -> Paths:
        """How paths are turned into token ids."""
        ...

    @property
    def route(self) -> str:
        """The path of the request's URL."""
        ...

    def body(self, paths: Sequence[Path]) -> dict[str, Any]:
        """The request's body without the model's name."""
        ...

    def rewards(self, answer: Json) -> list[float]:
        """Rewards in [0, 1], one a path. Raises EngineError for an answer without them."""
        ...


@dataclass(frozen=True, slots=True)
class VerdictLogprobs:
    """Asks completions for a causal model's log-probabilities of its two verdicts."""

    paths: Paths
    softmax: Softmax
    pieces: Sequence[bytes]
    route: str = "/v1/completions"

    def body(self, paths: Sequence[Path]) -> dict[str, Any]:
        """A body that has one token drawn, because most servers draw at least one."""
        verdicts = [self.softmax.good, self.softmax.bad]
        return {
            "prompt": [list(path) for path in paths],
            "max_tokens": 1,
            "temperature": 0,
            "logprobs": TOP,
            "logprob_token_ids": verdicts,
            "logit_bias": {str(token): BIAS for token in verdicts},
            "return_tokens_as_token_ids": True,
        }

    def rewards(self, answer: Json) -> list[float]:
        """Rewards from the first position of each choice."""
        choices = sorted(answer["choices"], key=lambda choice: choice["index"])
        return [self._share(choice) for choice in choices]

    def _share(self, choice: Json) -> float:
        positions = (choice.get("logprobs") or {}).get("top_logprobs") or [{}]
        good, bad = (
            self._logprob(positions[0], token) for token in (self.softmax.good, self.softmax.bad)
        )
        if good is None or bad is None:
            missing = self.softmax.bad if good is not None else self.softmax.good
            raise EngineError(
                f"the reward server told no log-probability of verdict {missing}; of vLLM every "
                f"token's is asked for, of others the {TOP} likeliest"
            )
        return self.softmax.share(good, bad)

    def _logprob(self, logprobs: Mapping[str, float], token: int) -> float | None:
        by_id = logprobs.get(f"{NAMED_ID}{token}")
        return logprobs.get(self.pieces[token].decode(errors="replace")) if by_id is None else by_id


@dataclass(frozen=True, slots=True)
class PooledOutputs:
    """Asks vLLM's pooling for the outputs of a reward model's own head at each path's last row.

    A single output is a value, divided by ``scale``; of several, number ``label`` is taken.
    """

    paths: Paths
    form: RewardFormat
    route: str = "/pooling"

    def body(self, paths: Sequence[Path]) -> dict[str, Any]:
        """A body that asks for the head's raw outputs."""
        return {"input": [list(path) for path in paths], "use_activation": False}

    def rewards(self, answer: Json) -> list[float]:
        """Rewards from the last row of each path."""
        items = sorted(answer["data"], key=lambda item: item["index"])
        return [self._reward(item["data"]) for item in items]

    def _reward(self, rows: Sequence[Any]) -> float:
        if not rows:
            raise EngineError(
                f"the reward server gave no outputs for a path that ends with {self.form.tag!r}: "
                "does its pooler read another tag? (vLLM: --pooler-config '{\"step_tag_id\": ID}')"
            )
        outputs = rows[-1] if isinstance(rows[-1], list) else rows
        if misfit := outputs_misfit(len(outputs), self.form):
            raise EngineError(f"the reward server's head has {misfit}")
        return outputs_reward(outputs, self.form)


def reward_request(form: RewardFormat, text: Text, policy: Text) -> PathsRequest:
    """The request for a reward model with this ``text`` beside the policy's.

    Raises RewardMissing for a tag or a verdict that the model lacks, or a format no server gives.
    """
    paths = paths_of(form, text, policy)
    if form.reads == "softmax":
        return VerdictLogprobs(paths, Softmax.of(form, text), text.pieces)
    if form.reads_hidden:
        return PooledOutputs(paths, form)
    raise RewardMissing(
        f"reward_format {form.name!r}: reads {form.reads!r}, which OpenAI-compatible servers do "
        "not give: use the embedded engine, or serve the model as a classifier"
    )


def trial_path(request: PathsRequest) -> Path:
    """A path of one step that a reward server must be able to score."""
    return request.paths.path((0,), "?", Trajectory(0, ((0,),), ("a",)), {})
