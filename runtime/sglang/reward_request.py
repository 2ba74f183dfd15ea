"""How a SGLang server is asked for the reward of a path, and how its answer becomes one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from runtime.reward_format import RewardFormat
from runtime.reward_path import Paths
from runtime.reward_reader import Softmax, classes_share, paths_of, sigmoid
from runtime.sglang.replica import Json, Replica
from runtime.text import Text
from search.engine import EngineError, RewardMissing


@dataclass(frozen=True, slots=True)
class RewardRequest:
    """A path, spelt by ``paths``, is read at its last token, with nothing sampled.

    With a ``softmax`` the server gives the log-probabilities of its two verdicts. Without, the raw
    outputs of its own head: one is a value, of several ``label`` is taken.
    """

    paths: Paths
    softmax: Softmax | None = None
    label: int = 0
    several: bool = False

    @classmethod
    def of(cls, form: RewardFormat, text: Text, policy: Text) -> RewardRequest:
        """For a reward model's ``text`` beside the policy's.

        Raises RewardMissing for a tag or a verdict that is not there, or that SGLang does not give.
        """
        if form.reads == "softmax":
            return cls(paths_of(form, text, policy), Softmax.of(form, text))
        if form.reads in ("value", "classes"):
            several = form.reads == "classes"
            return cls(paths_of(form, text, policy), label=form.label, several=several)
        raise RewardMissing(
            f"reward_format {form.name!r}: reads {form.reads!r}; SGLang gives log-probabilities, "
            "which do not hold the mean logit: use the embedded engine, or serve the model as a "
            "classifier"
        )

    async def send(
        self, replica: Replica, request: Mapping[str, Any], note: Mapping[str, Any]
    ) -> Json:
        """The server's answer; ``request`` holds the path and what every request has, ``note`` what
        a server with our plug-in is told.

        ``logprob_start_len`` -1 reads the last position alone: all before it may come from cache.
        """
        if self.softmax is None:
            return await replica.classify(request)
        return await replica.generate(
            {
                **request,
                "return_logprob": True,
                "logprob_start_len": -1,
                "token_ids_logprob": [self.softmax.good, self.softmax.bad],
                "sampling_params": {"max_new_tokens": 0, **note},
            }
        )

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
        return classes_share(outputs, self.label) if self.several else sigmoid(outputs[0])
