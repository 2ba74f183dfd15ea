"""Validation: what a round, its token ids and their number must be like to be decoded at all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from runtime.embedded.checks import LARGEST, MOST_NODES, SEEDS, each, ids, real, whole
from runtime.embedded.messages import MOST_TO_DRAW
from runtime.stop_strings import encoded
from search.engine import Ahead, Branch, EngineError, PrefixTooLong, Sampling

MOST_STOPS = 32
STOP_BYTES = 1 << 16
"""Of all stop strings together; a table costs what these cost."""


def validate_branches(
    branches: Sequence[Branch], sampling: Sampling, vocab: int, rooms: Mapping[str, int]
) -> list[NDArray[np.int64]]:
    """The prefix of each branch, as an array; those of the same tuple are one.

    Raises EngineError for a branch or a sampling that nothing can be decoded by. ``vocab``: token
    ids are below it; ``rooms``: what a prefix and its step must fit, by name.
    """
    _check_sampling(sampling)
    prefixes: dict[int, NDArray[np.int64]] = {}
    tokens = 0
    for branch in branches:
        if not isinstance(branch, Branch):
            raise EngineError(f"branches: {type(branch).__name__} among them; Branch is needed")
        _check_branch(branch, sampling)
        if id(branch.tokens) not in prefixes:
            prefixes[id(branch.tokens)] = must_be_ids("tokens", branch.tokens, vocab)
            tokens += len(branch.tokens)
        must_fit(
            len(branch.tokens) + branch.limit,
            rooms,
            f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
            "do not fit the",
        )
    if tokens > MOST_TO_DRAW and len(prefixes) > 1:
        raise EngineError(f"tokens: {tokens} in all; at most {MOST_TO_DRAW} are allowed at once")
    return [prefixes[id(branch.tokens)] for branch in branches]


def must_be_ids(
    field: str, tokens: Sequence[int] | NDArray[np.int64], vocab: int
) -> NDArray[np.int64]:
    """``tokens``, some ids of a model with ``vocab`` of them, as an array. Raises EngineError."""
    array = ids(field, tokens)
    if not len(array):
        raise EngineError(f"{field}: empty; at least one token id is needed")
    for token in (array.min(), array.max()):
        if not 0 <= token < vocab:
            raise EngineError(f"{field}: token id {token}; ids from 0 to {vocab - 1} are needed")
    return array


def must_fit(tokens: int, rooms: Mapping[str, int], what: str) -> None:
    """Raise PrefixTooLong, "``what`` NAME of ROOM", for the first room too small for ``tokens``."""
    for name, room in rooms.items():
        if tokens > room:
            raise PrefixTooLong(f"{what} {name} of {room}")


def _check_sampling(sampling: Sampling) -> None:
    if not isinstance(sampling, Sampling):
        raise EngineError(f"sampling: {type(sampling).__name__}; Sampling is needed")
    real("temperature", sampling.temperature, "0 or more")
    real("top_p", sampling.top_p, "more than 0 and at most 1")
    if not 0 < sampling.top_p <= 1:
        raise EngineError(f"top_p: {sampling.top_p}; more than 0 and at most 1 is needed")
    whole("max_step_tokens", sampling.max_step_tokens, 1, LARGEST)
    stops = each("stop", sampling.stop, str, MOST_STOPS)
    try:
        size = sum(map(len, encoded(stops)))
    except ValueError as error:
        raise EngineError(str(error)) from None
    if size > STOP_BYTES:
        raise EngineError(f"stop: {size} bytes in all; at most {STOP_BYTES} are allowed")


def _check_branch(branch: Branch, sampling: Sampling) -> None:
    whole("parent", branch.parent, 0, MOST_NODES)
    whole("child", branch.child, 0, LARGEST)
    whole("seed", branch.seed, 0, SEEDS)
    whole("node", branch.node, -LARGEST, MOST_NODES)
    whole("limit", branch.limit, 1, sampling.max_step_tokens)
    if branch.ahead is not None:
        _check_ahead(branch.ahead)


def _check_ahead(ahead: Ahead) -> None:
    """Beam extension may begin children: their seeds follow from 32-bit places on a path."""
    if not isinstance(ahead, Ahead):
        raise EngineError(f"ahead: {type(ahead).__name__}; Ahead is needed")
    whole("ahead.seed", ahead.seed, 0, SEEDS)
    whole("ahead.children", ahead.children, -LARGEST, (1 << 32) - 1)
    whole("ahead.room", ahead.room, -LARGEST, LARGEST)
    for place in each("ahead.path", ahead.path, int):
        whole("ahead.path", place, 0, (1 << 32) - 1)
