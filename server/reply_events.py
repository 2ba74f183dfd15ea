"""Events of a reply while it is drawn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.reply_logprobs import ReplyToken


@dataclass(frozen=True, slots=True)
class Certain:
    """A part of a choice's text that can no longer change; ``tokens``: of all its text so far,
    if their log-probabilities are asked for and known."""

    index: int
    text: str
    tokens: Sequence[ReplyToken] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A part of the first choice's reasoning, which is shown apart from its text."""

    text: str


Tell = Callable[[Certain | ReasoningPart], None]
