"""Decide by KV which searches may run a round on a server, and how many tokens to ask for per draw.

Searches whose rounds take turns in a pool that holds only some of them evict each other's prefixes:
every round computes again what the others' rounds have pushed out. So a search holds its share from
its first round to its end, the oldest first, and the others wait. A round needs the paths that it
draws from and what it draws; whatever else its search may come back to stays as far as it fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import ne


def may_run(needs: Sequence[int], capacity: int) -> list[bool]:
    """Whether each search may run a round; ``needs``: their tokens of KV, the oldest search first.

    A search may run if it fits beside all older ones that may; the oldest always may. So a search
    never waits for a later one, it runs at the latest when all earlier ones have ended, and one
    that does not fit does not keep smaller ones waiting.
    """
    remaining, allowed = capacity, []
    for place, need in enumerate(needs):
        runs = not place or need <= remaining
        remaining -= need if runs else 0
        allowed.append(runs)
    return allowed


def tokens_of(paths: Iterable[tuple[int, ...]]) -> int:
    """Tokens that a prefix cache holds for these paths; a common prefix counts once."""
    distinct = sorted(set(paths))
    common = sum(_common_length(*neighbours) for neighbours in pairwise(distinct))
    return sum(map(len, distinct)) - common


def tokens_at_once(
    lengths: Mapping[int, int], *, draws: int, limit: int, pool: int, held_tokens: int, longest: int
) -> int:
    """The most tokens to request for each draw of a round; a longer step is continued by another.

    SGLang admits a request if the pool has room for all its tokens, where room is whatever no
    request reads at that moment. So steps that end long before their ``limit`` leave most of a pool
    unused, and too many at once evict what the round reads next. Returns the step length seen so
    far (``lengths``: how many steps had each) with which the round takes the fewest passes, or the
    limit if none takes fewer; never a length with which the draws at once take more, on average,
    than the ``pool`` has beside what the round reads (``held_tokens``, of which the ``longest``
    path is always in use). A draw takes one more slot for its prefix's last token, which is
    computed again.
    """
    steps = sum(lengths.values())
    if not steps:
        return limit
    mean = sum(length * count for length, count in lengths.items()) / steps
    room = pool - longest
    best, fewest = limit, _passes(draws, min(limit, max(lengths)), room // (limit + 1))
    longer = 0
    for length in sorted(lengths, reverse=True):
        at_once = room // (length + 1)
        if length < limit and min(at_once, draws) * mean <= pool - held_tokens:
            go_on = math.ceil(draws * longer / steps)
            rest = _passes(go_on, max(lengths) - length, room // (limit - length + 1))
            passes = _passes(draws, length, at_once) + rest
            best, fewest = (length, passes) if passes < fewest else (best, fewest)
        longer += lengths[length]
    return best


def _passes(draws: int, tokens: int, at_once: int) -> int:
    """Passes for ``draws`` of ``tokens`` each, ``at_once`` together; each draw begins with one."""
    return math.ceil(draws / max(1, at_once)) * (1 + tokens)


def _common_length(path: Sequence[int], other: Sequence[int]) -> int:
    """The length of two paths' common prefix."""
    differences = map(ne, path, other)
    return next((i for i, differ in enumerate(differences) if differ), min(len(path), len(other)))
