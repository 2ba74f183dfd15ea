"""The problem that a search solves."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Problem:
    """A question and its prompt.

    ``prompt``: the policy model's token ids, chat template included. ``question``: the user's own
    words, for the reward model. ``delimiter``: what ends a step.
    """

    prompt: tuple[int, ...]
    question: str
    delimiter: str = "\n\n"

    def __post_init__(self) -> None:
        """Refuse a delimiter that no step could end with."""
        if not self.delimiter:
            raise ValueError("delimiter: empty; at least one character is needed")
