"""How a SGLang server is asked for the reward of a path, and how its answer becomes one."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from runtime.reward_format import RewardFormat
from runtime.reward_path import Paths
from runtime.reward_reader import Softmax, classes_share, paths_of, sigmoid
from runtime.sglang.replica import Json, Replica
from runtime.text import Text
from search.engine import EngineError, RewardMissing


class RewardRequest(Protocol):
    """A way to read a path, of ids ``path``, at its last token, with nothing drawn."""

    async def ask(
        self, replica: Replica, request: Mapping[str, Any], said: Mapping[str, Any]
    ) -> Json:
        """The server's answer; ``request`` holds the path and what every request has, ``said`` what
        a server with our plug-in is told."""
        ...

    def reward(self, answer: Json) -> float:
        """In [0, 1]. Raises EngineError for an answer that does not hold it."""
        ...


@dataclass(frozen=True, slots=True)
class VerdictRequest:
    """P(``good``) against ``bad`` from their log-probabilities.

    ``logprob_start_len`` -1 reads the last position alone, so all before it may come from cache.
    """

    softmax: Softmax

    async def ask(
        self, replica: Replica, request: Mapping[str, Any], said: Mapping[str, Any]
    ) -> Json:
        """Log-probabilities of the two verdicts."""
        return await replica.generate(
            {
                **request,
                "return_logprob": True,
                "logprob_start_len": -1,
                "token_ids_logprob": [self.softmax.good, self.softmax.bad],
                "sampling_params": {"max_new_tokens": 0, **said},
            }
        )

    def reward(self, answer: Json) -> float:
        """Their softmax."""
        found = answer["meta_info"].get("output_token_ids_logprobs") or [[]]
        by_id = {token: logprob for logprob, token, *_ in found[0]}
        try:
            return self.softmax.share(by_id[self.softmax.good], by_id[self.softmax.bad])
        except KeyError:
            raise EngineError("SGLang gave no log-probabilities of the verdicts") from None


@dataclass(frozen=True, slots=True)
class ClassifierRequest:
    """The raw outputs of a server's own head: one is a value, of several ``label`` is taken."""

    label: int
    several: bool

    async def ask(
        self, replica: Replica, request: Mapping[str, Any], said: Mapping[str, Any]
    ) -> Json:
        """The head's outputs at the last token."""
        return await replica.classify(request)

    def reward(self, answer: Json) -> float:
        """Sigmoid of a value, or the label's share of the softmax."""
        values: Sequence[float] = answer["embedding"]
        if self.several != (len(values) > max(1, self.label)):
            wanted = f"more than {max(1, self.label)} outputs" if self.several else "one output"
            raise EngineError(
                f"the reward server's head has {len(values)} outputs; {wanted} needed"
            )
        return classes_share(values, self.label) if self.several else sigmoid(values[0])


@dataclass(frozen=True, slots=True)
class Asking:
    """A reward format on SGLang: what the model reads, and how it is asked."""

    paths: Paths
    reading: RewardRequest


def asking_of(form: RewardFormat, text: Text, policy: Text) -> Asking:
    """For a reward model's ``text`` beside the policy's.

    Raises RewardMissing for a tag or a verdict that is not there, or that SGLang does not tell.
    """
    if form.reads == "softmax":
        return Asking(paths_of(form, text, policy), VerdictRequest(Softmax.of(form, text)))
    if form.reads in ("value", "classes"):
        several = form.reads == "classes"
        return Asking(paths_of(form, text, policy), ClassifierRequest(form.label, several))
    raise RewardMissing(
        f"reward_format {form.name!r}: reads {form.reads!r}; SGLang tells log-probabilities, which "
        "do not hold the mean logit: use the embedded engine, or serve the model as a classifier"
    )


def own_logprobs(answer: Json) -> tuple[float, int]:
    """The sum of the input's log-probabilities that were asked for, and how many there are."""
    found = [
        entry[0] for entry in answer["meta_info"]["input_token_logprobs"] if entry[0] is not None
    ]
    return math.fsum(found), len(found)
