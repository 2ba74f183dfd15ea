"""What is told of a reply while it grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from server.reply_logprobs import ReplyToken


@dataclass(frozen=True, slots=True)
class Certain:
    """A part of a choice's text that can no longer change; ``tokens``: all of its text so far, if
    their log-probabilities are asked for and known."""

    index: int
    text: str
    tokens: Sequence[ReplyToken] | None = None


@dataclass(frozen=True, slots=True)
class ReasoningPart:
    """A part of what is told apart from the first choice, as its reasoning."""

    text: str


Tell = Callable[[Certain | ReasoningPart], None]
