"""A reward format applied to one reward model's tokens and tensors: the path to read, the reward.

Rewards are read at a path's last token only, even if the tag's id also occurs earlier.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from runtime.checkpoint import architecture
from runtime.reward_format import Ids, Reads, RewardFormat, Spelt
from runtime.reward_texts import Dialogue, OwnIds
from runtime.text import Text
from runtime.whole_reply import WholeReply
from search.engine import RewardMissing, Trajectory

if TYPE_CHECKING:
    import torch

log = logging.getLogger(__name__)

UNBIASED = "ForSequenceClassification"
"""Suffix of transformers' classes whose head is one layer without a bias."""
_LARGEST_EXPONENT = 700.0
Matrix = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PolicyIds:
    """Paths in the policy's own ids: the prompt, and each step with the tag after it.

    A step that ends with the tag's id gets no second one.
    """

    tag: int | None

    def opening(self, prompt: Sequence[int], question: str, spelt: Spelt) -> Ids:
        """The ids of the policy's prompt."""
        return tuple(prompt)

    def path(
        self, prompt: Sequence[int], question: str, trajectory: Trajectory, spelt: Spelt
    ) -> Ids:
        """The ids of prompt, step, tag, step, tag, and so on."""
        path = list(prompt)
        for step in trajectory.steps:
            path += step
            if self.tag is not None and step[-1] != self.tag:
                path.append(self.tag)
        return tuple(path)


Paths = PolicyIds | OwnIds | Dialogue | WholeReply
"""How a format spells what the reward model reads: every path of a question begins with its
``opening``, which may be empty, and a ``path`` is read at its last token. Both add tokenised pieces
to ``spelt``."""


@dataclass(frozen=True, slots=True)
class Softmax:
    """P(``good``) against ``bad``, two token ids."""

    good: int
    bad: int

    def reward(self, row: torch.Tensor) -> float:
        """1 / (1 + e^(bad - good)) from logits (vocab,)."""
        return self.share(float(row[self.good]), float(row[self.bad]))

    @staticmethod
    def share(good: float, bad: float) -> float:
        """The same, from the two verdicts' logits or log-probabilities."""
        return sigmoid(good - bad)

    @classmethod
    def of(cls, form: RewardFormat, text: Text) -> Softmax:
        """For a model's ``text``. Raises RewardMissing if a verdict is not one of its tokens."""
        return cls(_token(form, text, "good"), _token(form, text, "bad"))


@dataclass(frozen=True, slots=True)
class Mean:
    """The sigmoid of the mean logit.

    Checkpoints for it hold a scalar reward head, repeated for every token of the vocabulary.
    """

    def reward(self, row: torch.Tensor) -> float:
        """The reward from logits (vocab,)."""
        return sigmoid(math.fsum(row.tolist()) / len(row))


@dataclass(frozen=True, slots=True)
class Head:
    """Linear layers (outputs, inputs) with biases on the final hidden state, ReLU between them."""

    layers: tuple[tuple[Matrix, Matrix], ...]
    form: RewardFormat

    def reward(self, row: torch.Tensor) -> float:
        """The reward from the hidden state (hidden,) after the final norm."""
        values = row.numpy().astype(np.float64)
        for number, (weight, bias) in enumerate(self.layers):
            if number:
                values = np.maximum(values, 0.0)
            # plain loops, unlike BLAS, round the same with any number of threads
            values = np.einsum("ij,j->i", weight, values, optimize=False) + bias
        return outputs_reward(values, self.form)

    @classmethod
    def of(cls, form: RewardFormat, text: Text) -> Head:
        """Load the head. Raises RewardMissing naming a tensor that is missing or does not fit."""
        from runtime.embedded.model.layers import tensor_reader

        try:
            read = tensor_reader(text.checkpoint)
            biased = not (architecture(text.checkpoint) or "").endswith(UNBIASED)
            layers = tuple(_layer(read, name, biased=biased) for name in form.head)
        except ValueError as error:
            raise RewardMissing(f"reward_format {form.name!r}: head: {error}") from None
        if misfit := outputs_misfit(len(layers[-1][1]), form):
            head = f"head {form.head[-1]} of {text.checkpoint}"
            raise RewardMissing(f"reward_format {form.name!r}: {head} has {misfit}")
        return cls(layers, form)


Reading = Softmax | Mean | Head
"""How the row at a path's last token, logits (vocab,) or a hidden state (hidden,), becomes a reward
in [0, 1]: in float64, from this row alone."""

READINGS: Mapping[Reads, Callable[[RewardFormat, Text], Reading]] = {
    "softmax": Softmax.of,
    "mean": lambda form, text: Mean(),
    "value": Head.of,
    "classes": Head.of,
}


@dataclass(frozen=True, slots=True)
class Reader:
    """The paths that a reward model reads and how its output becomes a reward, for engines."""

    paths: Paths
    reading: Reading

    @classmethod
    def of(cls, form: RewardFormat, text: Text, policy: Text) -> Reader:
        """For a reward model's ``text`` beside the policy's.

        Raises RewardMissing for a tag, a verdict or a head that the model lacks, ValueError for an
        unsuitable chat template or a context that is too small.
        """
        paths, reading = paths_of(form, text, policy), READINGS[form.reads](form, text)
        least = len(paths.path((0,), "", Trajectory(0, ((0,),), ("",)), {}))
        if least >= text.context:
            raise ValueError(
                f"reward_format {form.name!r}: one empty step takes {least} tokens; the context of "
                f"{text.checkpoint} holds {text.context}"
            )
        return cls(paths, reading)


def overhead_of(paths: Paths) -> tuple[int, int]:
    """Tokens that a path has beyond the policy's: once, and for each step."""
    prompt, none, some = (0,), Trajectory(0, (), ()), ((0,),)
    empty = len(paths.path(prompt, "", none, {})) - len(prompt)
    one_step = len(paths.path(prompt, "", Trajectory(0, some, ("",)), {}))
    two_steps = len(paths.path(prompt, "", Trajectory(0, some * 2, ("", "")), {}))
    step_tokens = len(some[0]) if isinstance(paths, PolicyIds) else 0
    return max(0, empty), max(one_step - empty - len(prompt), two_steps - one_step) - step_tokens


def paths_of(form: RewardFormat, text: Text, policy: Text) -> Paths:
    """The paths for a reward model with this ``text`` beside the policy's.

    Raises RewardMissing for a tag that is not one token, ValueError for a chat template that cannot
    be cut into turns.
    """
    if form.spells == "dialogue":
        return Dialogue.of(form, text)
    if form.spells == "reply":
        return WholeReply(form, text)
    tag = _token(form, text, "tag") if form.tag else None
    if form.spells == "policy":
        if text.pieces == policy.pieces:
            return PolicyIds(tag)
        log.info(
            "%s has another tokenizer than the policy: its path is spelt from the steps' texts",
            text.checkpoint,
        )
    return OwnIds(form, text, tag)


def _token(form: RewardFormat, text: Text, part: str) -> int:
    """The id of the format's ``part``. Raises RewardMissing if it is not one of the model's ids."""
    piece = getattr(form, part)
    token = piece if isinstance(piece, int) else text.token(piece)
    if token is None:
        raise RewardMissing(
            f"reward_format {form.name!r}: {part} {piece!r} is not one token of {text.checkpoint}"
        )
    if not 0 <= token < text.model_vocab:
        raise RewardMissing(
            f"reward_format {form.name!r}: {part} {piece!r} is token {token}; the model of "
            f"{text.checkpoint} has ids from 0 to {text.model_vocab - 1}"
        )
    return token


def _layer(
    read: Callable[[str], torch.Tensor], name: str, *, biased: bool
) -> tuple[Matrix, Matrix]:
    weight = read(f"{name}.weight").numpy().astype(np.float64)
    if not biased:
        return weight, np.zeros(len(weight))
    return weight, read(f"{name}.bias").numpy().astype(np.float64)


def outputs_misfit(outputs: int, form: RewardFormat) -> str | None:
    """What is wrong with the number of a head's outputs; None if it fits the format."""
    if form.reads == "value":
        return None if outputs == 1 else f"{outputs} outputs; exactly one is needed"
    least = max(2, form.label + 1)
    return None if outputs >= least else f"{outputs} outputs; at least {least} are needed"


def outputs_reward(outputs: Sequence[float] | Matrix, form: RewardFormat) -> float:
    """A head's outputs as a reward: for ``value`` the sigmoid of the only one over ``scale``, else
    output ``label``'s share of the softmax."""
    if form.reads == "value":
        return sigmoid(float(outputs[0]) / form.scale)
    return classes_share(outputs, form.label)


def classes_share(values: Sequence[float] | Matrix, label: int) -> float:
    """Output ``label``'s share of the softmax over a head's outputs (classes,)."""
    outputs = np.asarray(values, dtype=np.float64)
    weights = np.exp(outputs - outputs.max())
    return float(weights[label] / weights.sum())


def sigmoid(x: float) -> float:
    """1 / (1 + e^-x), without overflow."""
    return 1.0 / (1.0 + math.exp(min(-x, _LARGEST_EXPONENT)))
