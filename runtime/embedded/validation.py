"""What ends a call alone: a value that no message may hold, and what is raised at its work.

Whoever sent a message, only what is sound in it is worked on; all checks raise EngineError, which
names the field, what it is and what is needed.
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
"""The least number above 0, and the largest that is finite."""


@dataclass(frozen=True, slots=True)
class CallError:
    """What failed for a tree, None for no tree that could be told; ``call``: at taking on or
    answering this one."""

    tree: str | None
    call: int | None
    error: Exception


class CallErrors:
    """The errors that nobody has looked at yet: one of each call, and one of each tree."""

    def __init__(self) -> None:
        self._errors: list[CallError] = []

    @contextmanager
    def at(self, tree: str | None, call: int | None = None) -> Iterator[None]:
        """What is raised within has to do with this tree alone: it is noted and goes no further."""
        try:
            yield
        except Exception as error:  # noqa: BLE001  # whatever it is
            self.note(CallError(tree, call, error))

    def note(self, error: CallError) -> None:
        """Keep an error until somebody looks."""
        if error.call is not None or error.tree not in self:
            self._errors.append(error)

    def __contains__(self, tree: str | None) -> bool:
        return any(error.tree == tree for error in self._errors)

    def take(self) -> Iterator[CallError]:
        """Those since the last look."""
        errors, self._errors = self._errors, []
        return iter(errors)


def check(message: object) -> None:
    """Raise EngineError for a message that is none, or holds what no message does.

    The branches and the sampling of a round are looked at where they are taken on.
    """
    if not isinstance(message, Expand | Score | Embed | TreeHint | Release | Ping):
        raise EngineError(f"message: {in_words(message)}; one of the engine's is needed")
    if not isinstance(message, TreeHint):
        whole("call", message.call, 0, LARGEST)
    if not isinstance(message, Ping):
        name("tree", message.tree)
    match message:
        case Score(_, _, prompt, question, trajectories):
            ids("prompt", prompt)
            text("question", question)
            _check_trajectories(trajectories)
        case Embed(_, _, steps):
            for step in each("steps", steps, StepWords):
                ids("steps", step.tokens)
                text("texts", step.text)
        case TreeHint(_, hint):
            _check_hint(hint)
        case _:
            pass


def in_words(value: object) -> str:
    """A value in few words, whatever it is."""
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    return str(value) if isinstance(value, int | float) else type(value).__name__


def whole(field: str, value: object, least: int, most: int) -> None:
    """A whole number from ``least`` to ``most``."""
    if type(value) is not int or not least <= value <= most:
        raise EngineError(f"{field}: {in_words(value)}; from {least} to {most} is needed")


def real(field: str, value: object, least: float, most: float, needed: str) -> None:
    """A number from ``least`` to ``most``, which are finite; ``needed`` says it in words."""
    if type(value) not in (int, float) or not least <= value <= most:  # type: ignore[operator]
        raise EngineError(f"{field}: {in_words(value)}; {needed} is needed")


def text(field: str, value: object) -> None:
    """Text that has bytes."""
    if not isinstance(value, str):
        raise EngineError(f"{field}: {in_words(value)}; text is needed")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        half = f"{value[error.start]!a}, half a character"
        raise EngineError(f"{field}: holds {half}; whole ones are needed") from None


def name(field: str, value: object) -> None:
    """A tree's name."""
    text(field, value)
    if "\0" in str(value):
        raise EngineError(f"{field}: holds a zero byte; none is allowed")


def each(field: str, values: object, kind: type[T], most: int = MOST_AT_ONCE) -> Sequence[T]:
    """``values``, if they are a tuple of at most ``most`` of this kind."""
    if not isinstance(values, tuple):
        raise EngineError(f"{field}: {in_words(values)}; a tuple is needed")
    if len(values) > most:
        raise EngineError(f"{field}: {len(values)} of them; at most {most} are allowed at once")
    for value in values:
        if not isinstance(value, kind):
            raise EngineError(f"{field}: {in_words(value)} among them; {kind.__name__} is needed")
    return values


def ids(field: str, tokens: object) -> NDArray[np.int64]:
    """Token ids, whole numbers of at most 64 bits, as an array (n,)."""
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
    trajectories = each("trajectories", trajectories, Trajectory)
    for one in trajectories:
        whole("node", one.node, 0, MOST_NODES)
        whole("seed", one.seed, 0, SEEDS)
        steps, texts = each("steps", one.steps, tuple), each("texts", one.texts, str)
        one.check_steps()
        if len(steps) != len(texts):
            raise EngineError(f"texts: {len(texts)} for {len(steps)} steps; as many are needed")
        for step, words in zip(steps, texts, strict=True):
            if id(step) not in checked:  # those above a fork are one and the same
                checked.add(id(step))
                ids("steps", step)
            if id(words) not in checked:
                checked.add(id(words))
                text("texts", words)
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
        real("values", value, 0, 1, "from 0 to 1")


def _nodes(field: str, nodes: object) -> None:
    array = _whole_numbers(field, nodes, "ids of nodes are needed")
    if len(array) and not (array.min() >= 0 and array.max() <= MOST_NODES):
        raise EngineError(f"{field}: from {array.min()} to {array.max()}; ids of nodes are needed")


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


def _check_sampling(sampling: Sampling, vocab: int) -> None:
    if not isinstance(sampling, Sampling):
        raise EngineError(f"sampling: {type(sampling).__name__}; Sampling is needed")
    real("temperature", sampling.temperature, 0, FINITE, "0 or more")
    real("top_p", sampling.top_p, TINY, 1, "more than 0 and at most 1")
    whole("max_step_tokens", sampling.max_step_tokens, 1, LARGEST)
    _check_logits_params(sampling.logits, vocab)
    whole("prompt_tokens", sampling.prompt_tokens, 0, LARGEST)
    if sampling.logprobs is not None:
        whole("logprobs", sampling.logprobs, 0, vocab)
    if sampling.grammar is not None:
        text("grammar", sampling.grammar)
    stops = each("stop", sampling.stop, str, MOST_STOPS)
    try:
        size = sum(map(len, encode_stops(stops)))
    except ValueError as error:
        raise EngineError(str(error)) from None
    if size > STOP_BYTES:
        raise EngineError(f"stop: {size} bytes in all; at most {STOP_BYTES} are allowed")


def _check_logits_params(params: LogitsParams, vocab: int) -> None:
    if not isinstance(params, LogitsParams):
        raise EngineError(f"logits: {in_words(params)}; LogitsParams are needed")
    whole("top_k", params.top_k, -1, LARGEST)
    real("min_p", params.min_p, 0, 1, "from 0 to 1")
    whole("min_tokens", params.min_tokens, 0, LARGEST)
    real("repetition_penalty", params.repetition_penalty, TINY, FINITE, "more than 0")
    for field in ("presence_penalty", "frequency_penalty"):
        real(field, getattr(params, field), -FINITE, FINITE, "a finite number")
    for pair in each("logit_bias", params.logit_bias, tuple, vocab):
        if len(pair) != 2:
            raise EngineError(f"logit_bias: {len(pair)} in one; a token id and a number are needed")
        whole("logit_bias", pair[0], 0, vocab - 1)
        real("logit_bias", pair[1], -FINITE, FINITE, "a finite number")


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
