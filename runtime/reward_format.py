"""How a reward model is asked about a step, and how its logits become a reward: as data."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from runtime.text import Text
from search.engine import RewardMissing

if TYPE_CHECKING:
    import torch

_LARGEST_EXPONENT = 700.0


@dataclass(frozen=True, slots=True)
class RewardFormat:
    """``tag`` stands after every step and stays in the path; at the tag the logits are read.

    ``reads`` says how they become [0, 1]: ``softmax`` is P(``good``) against ``bad``; ``logprob``
    reads no reward model: exp of the policy's mean log-probability a token of the whole path.
    """

    name: str
    reads: Literal["softmax", "logprob"]
    tag: str = ""
    good: str = ""
    bad: str = ""

    @property
    def needs_model(self) -> bool:
        """Whether a reward model is read at all."""
        return self.reads != "logprob"


REWARD_FORMATS: Mapping[str, RewardFormat] = {
    "math-shepherd": RewardFormat("math-shepherd", "softmax", tag="ки", good="+", bad="-"),
    "none": RewardFormat("none", "logprob"),
}


def reward_format(name: str) -> RewardFormat:
    """The format of that name; ValueError names what there is."""
    try:
        return REWARD_FORMATS[name]
    except KeyError:
        allowed = ", ".join(REWARD_FORMATS)
        raise ValueError(f"reward_format: {name!r}; one of {allowed} is needed") from None


@dataclass(frozen=True, slots=True)
class TagReader:
    """A reward format in a reward model's own token ids."""

    tag: int
    good: int
    bad: int

    @classmethod
    def of(cls, form: RewardFormat, text: Text) -> TagReader:
        """Raises RewardMissing if the tag or a verdict is not one token of the model."""
        ids = {}
        for part in ("tag", "good", "bad"):
            wanted = getattr(form, part)
            found = text.token(wanted)
            if found is None:
                raise RewardMissing(
                    f"reward_format {form.name!r}: {part} {wanted!r} is not one token of "
                    f"{text.checkpoint}"
                )
            ids[part] = found
        return cls(**ids)

    def path(self, prompt: Sequence[int], steps: Sequence[Sequence[int]]) -> tuple[int, ...]:
        """What the reward model reads: the prompt, and each step with the tag after it."""
        return (*prompt, *(token for step in steps for token in (*step, self.tag)))

    def reward(self, logits: torch.Tensor) -> float:
        """P(good) against bad, in float64, from the logits (vocab,) at the last tag."""
        behind = float(logits[self.bad]) - float(logits[self.good])
        return 1.0 / (1.0 + math.exp(min(behind, _LARGEST_EXPONENT)))
