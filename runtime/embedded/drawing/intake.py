"""What a round must be like to be drawn at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.embedded.drawing.account import must_fit
from runtime.embedded.drawing.batch import must_be_ids
from search.engine import Branch, EngineError, Sampling


def must_be_drawable(
    branches: Sequence[Branch], sampling: Sampling, vocab: int, rooms: Mapping[str, int]
) -> None:
    """Raise EngineError for a branch or a sampling that nothing can be drawn by.

    ``vocab``: token ids are below it; ``rooms``: what a prefix and its step must fit, by name.
    """
    if not all(sampling.stop):
        raise EngineError("stop: an empty string; at least one character is needed")
    if not sampling.temperature >= 0:
        raise EngineError(f"temperature: {sampling.temperature}; 0 or more is needed")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p: {sampling.top_p}; more than 0 and at most 1 is needed")
    for branch in branches:
        must_be_ids("tokens", branch.tokens, vocab)
        if not 1 <= branch.limit <= sampling.max_step_tokens:
            raise EngineError(
                f"limit: {branch.limit}; from 1 to {sampling.max_step_tokens} is needed"
            )
        must_fit(
            len(branch.tokens) + branch.limit,
            rooms,
            f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
            "do not fit the",
        )
