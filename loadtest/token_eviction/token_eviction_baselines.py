"""What ArborKV is compared with, as pure selections over a stream of tokens or a tree of blocks.

A stream is the path that is active now, prompt included; the originals never bring back what they
gave up. Each function takes the stream's length or its attention and a budget in tokens, and
returns the positions kept, ascending; a budget of the stream's length or more keeps everything.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from kvpolicy.eviction_order import Bools, Infeasible, Ints
from kvpolicy.token_allocation import Floors, allocate, select
from kvpolicy.value import Floats

SINKS = 4


def full(length: int) -> Ints:
    """Everything."""
    return np.arange(length, dtype=np.int64)


def tail_only(length: int, budget: int) -> Ints:
    """The most recent tokens."""
    _must_hold(budget)
    return np.arange(max(0, length - budget), length, dtype=np.int64)


def streaming_llm(length: int, budget: int, sinks: int = SINKS) -> Ints:
    """Attention sinks and a window: the first ``sinks`` tokens and the most recent ones."""
    _must_hold(budget)
    if budget >= length:
        return full(length)
    first = min(sinks, budget)
    recent = np.arange(length - (budget - first), length, dtype=np.int64)
    return np.concatenate([np.arange(first, dtype=np.int64), recent])


def h2o(attention: Floats, budget: int) -> Ints:
    """Heavy hitters: half the budget for the most recent tokens, half for those attended to most.

    ``attention`` (length,): what later tokens paid to each so far. An odd token is recent.
    """
    _must_hold(budget)
    length = len(attention)
    if budget >= length:
        return full(length)
    return select(length, budget, budget - budget // 2, attention)


def thought_decay(thoughts: Ints, attention: Floats, budget: int, least: int = 4) -> Ints:
    """Like ThinKV: older thoughts get less.

    ``thoughts`` (m,): lengths in order of time, adding up to the length of ``attention``. The
    newest stays whole; of the others each one's allowance is half the next one's, but ``least``
    tokens, within which those attended to most stay. Raises Infeasible if that does not fit.
    """
    _must_hold(budget)
    if int(thoughts.sum()) != len(attention):
        raise ValueError(
            f"thoughts: {int(thoughts.sum())} tokens; {len(attention)} are needed, as of attention"
        )
    newest = np.arange(len(thoughts)) == len(thoughts) - 1
    floors = Floors(ratio=0.0, tokens=least, tail=0)
    halves = 0.5 ** np.arange(len(thoughts), dtype=np.float64)[::-1]
    shares = allocate(halves, thoughts, newest, budget, floors, "share")
    ends = np.cumsum(thoughts)
    kept = []
    for size, keep, end in zip(thoughts, shares.counts, ends, strict=True):
        start = int(end - size)
        kept.append(start + select(int(size), int(keep), 0, attention[start : int(end)]))
    return np.concatenate(kept)


def lru(tokens: Ints, used: Ints, locked: Bools, budget: int) -> Ints:
    """Tokens kept of each block (n,): whole leaves go, the one unused for longest first.

    Parents stand before children; ``used`` (n,): when last used, a parent never earlier than its
    child; equal ones go from the higher index. What is ``locked`` (prefix-closed) stays. Raises
    Infeasible if that alone exceeds the budget.
    """
    _must_hold(budget)
    kept = tokens.copy()
    total = int(tokens.sum())
    order = np.lexsort((-np.arange(len(tokens)), used))
    for block in order[~locked[order]]:
        if total <= budget:
            break
        total -= int(kept[block])
        kept[block] = 0
    if total > budget:
        raise Infeasible(total, budget, "locked blocks")
    return kept


class Stream(NamedTuple):
    """What is held of a path: attention paid to each token (length,), tokens of each thought (m,),
    the prompt's first."""

    attention: Floats
    thoughts: Ints


def _of_thoughts(stream: Stream, budget: int) -> Ints:
    """``thought_decay``; its least stays where a budget is smaller than that."""
    try:
        return thought_decay(stream.thoughts, stream.attention, budget)
    except Infeasible as error:
        return thought_decay(stream.thoughts, stream.attention, error.needed)


STREAMS: Mapping[str, Callable[[Stream, int], Ints]] = {
    "tail_only": lambda stream, budget: tail_only(len(stream.attention), budget),
    "streaming_llm": lambda stream, budget: streaming_llm(len(stream.attention), budget),
    "h2o": lambda stream, budget: h2o(stream.attention, budget),
    "thinkv": _of_thoughts,
}
"""The positions of a stream that each policy keeps in a budget of tokens."""


def _must_hold(budget: int) -> None:
    if budget < 0:
        raise ValueError(f"budget: {budget}; 0 or more is needed")
