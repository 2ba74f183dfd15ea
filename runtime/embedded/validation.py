"""Errors that end a single call: invalid values in its message, and exceptions while it runs.

Messages are checked whoever sent them. All checks raise EngineError, which names the field, its
value and what is needed.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from runtime.embedded.pipe import (
    MOST_AT_ONCE,
    MOST_TO_EXPAND,
    MOST_TO_SCORE,
    Embed,
    Expand,
    Ping,
    Release,
    Score,
    StepWords,
    TreeHint,
    tokens_of,
)
from runtime.stop_strings import encode_stops
from search.engine import (
    Ahead,
    Branch,
    EngineError,
    Hint,
    LogitsParams,
    PrefixTooLong,
    Sampling,
    Trajectory,
)

T = TypeVar("T")

MOST_NODES = 1 << 22
"""The largest id: 65,536 expansions of 64 children, the most a request may ask for."""
LARGEST = (1 << 63) - 1
SEEDS = (1 << 64) - 1
TINY, FINITE = math.ulp(0.0), sys.float_info.max
"""The smallest number above 0, and the largest finite one."""
LARGEST_LOGIT = 1e6
"""The largest bias or penalty, far beyond any logit: arithmetic with it cannot overflow."""


@dataclass(frozen=True, slots=True)
class CallError:
    """An error of a tree, None if the tree is unknown; ``call``: the call that was being begun or
    answered, None for other work."""

    tree: str | None
    call: int | None
    error: Exception


class CallErrors:
    """Errors that have not been taken yet: at most one per tree, beside those that name a call."""

    def __init__(self) -> None:
        self._errors: list[CallError] = []

    @contextmanager
    def at(self, tree: str | None, call: int | None = None) -> Iterator[None]:
        """Catch exceptions of the ``with`` block and note them as errors of this tree alone."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is
            self.note(CallError(tree, call, error))

    def note(self, error: CallError) -> None:
        """Keep an error until ``take``."""
        if error.call is not None or error.tree not in self:
            self._errors.append(error)

    def __contains__(self, tree: str | None) -> bool:
        return any(error.tree == tree for error in self._errors)

    def take(self) -> Iterator[CallError]:
        """The errors since the last call."""
        errors, self._errors = self._errors, []
        return iter(errors)


def check(message: object) -> None:
    """Raise EngineError for what is not a message, or for a message with invalid values.

    A round's branches and sampling are checked where the round begins.
    """
    if not isinstance(message, Expand | Score | Embed | TreeHint | Release | Ping):
        raise EngineError(f"message: {in_words(message)}; one of the engine's is needed")
    if not isinstance(message, TreeHint):
        check_whole("call", message.call, 0, LARGEST)
    if not isinstance(message, Ping):
        check_name("tree", message.tree)
    match message:
        case Score(_, _, prompt, question, trajectories):
            check_ids("prompt", prompt)
            check_text("question", question)
            _check_trajectories(trajectories)
        case Embed(_, _, steps):
            for step in check_tuple("steps", steps, StepWords):
                check_ids("steps", step.tokens)
                check_text("texts", step.text)
        case TreeHint(_, hint):
            _check_hint(hint)
        case _:
            pass


def in_words(value: object) -> str:
    """A short description of any value, for error messages."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return str(value) if isinstance(value, int | float) else type(value).__name__


def check_whole(field: str, value: object, least: int, most: int) -> None:
    """Check that ``value`` is a whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise EngineError(f"{field}: {in_words(value)}; from {least} to {most} is needed")


def check_real(field: str, value: object, least: float, most: float, needed: str) -> None:
    """Check that ``value`` is from ``least`` to ``most``; ``needed``: the finite range in words."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise EngineError(f"{field}: {in_words(value)}; {needed} is needed")


def check_text(field: str, value: object) -> None:
    """Check that ``value`` is text that UTF-8 can encode."""
    if not isinstance(value, str):
        raise EngineError(f"{field}: {in_words(value)}; text is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"{value[error.start]!a}, half a character"
        raise EngineError(f"{field}: holds {half}; whole ones are needed") from None


def check_name(field: str, value: object) -> None:
    """Check that ``value`` is a tree's name: text without zero bytes."""
    check_text(field, value)
    if "\0" in str(value):
        raise EngineError(f"{field}: holds a zero byte; none is allowed")


def check_tuple(field: str, values: object, kind: type[T], most: int = MOST_AT_ONCE) -> Sequence[T]:
    """Check that ``values`` are a tuple of at most ``most`` of this kind, and return them."""
    if not isinstance(values, tuple):
        raise EngineError(f"{field}: {in_words(values)}; a tuple is needed")
    if len(values) > most:
        raise EngineError(f"{field}: {len(values)} of them; at most {most} are allowed at once")
    for value in values:
        if not isinstance(value, kind):
            raise EngineError(f"{field}: {in_words(value)} among them; {kind.__name__} is needed")
    return values


def check_ids(field: str, tokens: object) -> NDArray[np.int64]:
    """Check that ``tokens`` are whole numbers of at most 64 bits; returns them as an array (n,)."""
    return _whole_numbers(field, tokens, "whole numbers are needed as token ids")


def _whole_numbers(field: str, values: object, needed: str) -> NDArray[np.int64]:
    if not isinstance(values, Sequence | np.ndarray) or isinstance(values, str | bytes):
        raise EngineError(f"{field}: {in_words(values)}; {needed}")
    if not len(values):
        return np.empty(0, dtype=np.int64)
    try:
        array = np.asarray(values)
    except ValueError:  # sequences of several lengths
        array = np.empty((0, 0))
    if array.dtype.kind != "i" or array.ndim != 1:
        raise EngineError(f"{field}: other things than numbers, or too large ones; {needed}")
    return array.astype(np.int64, copy=False)


def _check_trajectories(trajectories: object) -> None:
    checked: set[int] = set()
    trajectories = check_tuple("trajectories", trajectories, Trajectory)
    for trajectory in trajectories:
        check_whole("node", trajectory.node, 0, MOST_NODES)
        check_whole("seed", trajectory.seed, 0, SEEDS)
        steps = check_tuple("steps", trajectory.steps, tuple)
        texts = check_tuple("texts", trajectory.texts, str)
        trajectory.check_steps()
        if len(steps) != len(texts):
            raise EngineError(f"texts: {len(texts)} for {len(steps)} steps; as many are needed")
        for step, words in zip(steps, texts, strict=True):
            if id(step) not in checked:  # trajectories share the steps above their fork
                checked.add(id(step))
                check_ids("steps", step)
            if id(words) not in checked:
                checked.add(id(words))
                check_text("texts", words)
    tokens = sum(map(tokens_of, trajectories))
    if tokens > MOST_TO_SCORE and len(trajectories) > 1:
        raise EngineError(f"steps: {tokens} tokens; at most {MOST_TO_SCORE} are allowed at once")


def _check_hint(hint: object) -> None:
    if not isinstance(hint, Hint) or not isinstance(hint.values, Mapping):
        raise EngineError(f"hint: {in_words(hint)}; values by node are needed")
    for field in ("active", "dead", "outlook"):
        _nodes(field, getattr(hint, field))
    _nodes("values", tuple(hint.values))
    for value in hint.values.values():
        check_real("values", value, 0, 1, "from 0 to 1")


def _nodes(field: str, nodes: object) -> None:
    array = _whole_numbers(field, nodes, "ids of nodes are needed")
    if len(array) and not (array.min() >= 0 and array.max() <= MOST_NODES):
        raise EngineError(f"{field}: from {array.min()} to {array.max()}; ids of nodes are needed")


MOST_STOPS = 32
STOP_BYTES = 1 << 16
"""Most bytes of all stop strings together; a table's cost grows with them."""


def validate_branches(
    branches: Sequence[Branch], sampling: Sampling, vocab: int, rooms: Mapping[str, int]
) -> list[NDArray[np.int64]]:
    """The prefix of each branch as an array; branches with the same tuple share it.

    Raises EngineError for an invalid branch or sampling. ``vocab``: token ids are below it;
    ``rooms``: limits, by name, for the tokens of a prefix and its step.
    """
    _check_sampling(sampling, vocab)
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
    if tokens > MOST_TO_EXPAND and len(prefixes) > 1:
        raise EngineError(f"tokens: {tokens} in all; at most {MOST_TO_EXPAND} are allowed at once")
    return [prefixes[id(branch.tokens)] for branch in branches]


def must_be_ids(
    field: str, tokens: Sequence[int] | NDArray[np.int64], vocab: int
) -> NDArray[np.int64]:
    """Check that ``tokens`` are ids below ``vocab``, at least one; returns them as an array."""
    array = check_ids(field, tokens)
    if not len(array):
        raise EngineError(f"{field}: empty; at least one token id is needed")
    for token in (array.min(), array.max()):
        if not 0 <= token < vocab:
            raise EngineError(f"{field}: token id {token}; ids from 0 to {vocab - 1} are needed")
    return array


def must_fit(tokens: int, rooms: Mapping[str, int], subject: str) -> None:
    """Raise PrefixTooLong, "``subject`` NAME of ROOM", for the first room below ``tokens``."""
    for name, room in rooms.items():
        if tokens > room:
            raise PrefixTooLong(f"{subject} {name} of {room}")


def _check_sampling(sampling: Sampling, vocab: int) -> None:
    if not isinstance(sampling, Sampling):
        raise EngineError(f"sampling: {type(sampling).__name__}; Sampling is needed")
    check_real("temperature", sampling.temperature, 0, FINITE, "0 or more")
    check_real("top_p", sampling.top_p, TINY, 1, "more than 0 and at most 1")
    check_whole("max_step_tokens", sampling.max_step_tokens, 1, LARGEST)
    _check_logits_params(sampling.logits, vocab)
    check_whole("prompt_tokens", sampling.prompt_tokens, 0, LARGEST)
    if sampling.logprobs is not None:
        check_whole("logprobs", sampling.logprobs, 0, vocab)
    if sampling.grammar is not None:
        check_text("grammar", sampling.grammar)
    stops = check_tuple("stop", sampling.stop, str, MOST_STOPS)
    try:
        size = sum(map(len, encode_stops(stops)))
    except ValueError as error:
        raise EngineError(str(error)) from None
    if size > STOP_BYTES:
        raise EngineError(f"stop: {size} bytes in all; at most {STOP_BYTES} are allowed")


def _check_logits_params(params: LogitsParams, vocab: int) -> None:
    if not isinstance(params, LogitsParams):
        raise EngineError(f"logits: {in_words(params)}; LogitsParams are needed")
    check_whole("top_k", params.top_k, -1, LARGEST)
    check_real("min_p", params.min_p, 0, 1, "from 0 to 1")
    check_whole("min_tokens", params.min_tokens, 0, LARGEST)
    penalty, least, most = params.repetition_penalty, 1 / LARGEST_LOGIT, LARGEST_LOGIT
    check_real("repetition_penalty", penalty, least, most, f"from {least:g} to {most:g}")
    for field in ("presence_penalty", "frequency_penalty"):
        check_real(field, getattr(params, field), -most, most, f"from {-most:g} to {most:g}")
    for pair in check_tuple("logit_bias", params.logit_bias, tuple, vocab):
        if len(pair) != 2:
            raise EngineError(f"logit_bias: {len(pair)} in one; a token id and a number are needed")
        check_whole("logit_bias", pair[0], 0, vocab - 1)
        check_real("logit_bias", pair[1], -most, most, f"from {-most:g} to {most:g}")


def _check_branch(branch: Branch, sampling: Sampling) -> None:
    check_whole("parent", branch.parent, 0, MOST_NODES)
    check_whole("child", branch.child, 0, LARGEST)
    check_whole("seed", branch.seed, 0, SEEDS)
    check_whole("node", branch.node, -LARGEST, MOST_NODES)
    check_whole("limit", branch.limit, 1, sampling.max_step_tokens)
    if branch.ahead is not None:
        _check_ahead(branch.ahead)


def _check_ahead(ahead: Ahead) -> None:
    """Check what beam extension begins children by; child indices on a path must have 32 bits."""
    if not isinstance(ahead, Ahead):
        raise EngineError(f"ahead: {type(ahead).__name__}; Ahead is needed")
    check_whole("ahead.seed", ahead.seed, 0, SEEDS)
    check_whole("ahead.children", ahead.children, -LARGEST, (1 << 32) - 1)
    check_whole("ahead.room", ahead.room, -LARGEST, LARGEST)
    for place in check_tuple("ahead.path", ahead.path, int):
        check_whole("ahead.path", place, 0, (1 << 32) - 1)
