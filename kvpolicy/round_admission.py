"""Which searches may run a round on a server, by what each needs of its KV, and how much of each
draw to ask for.

Searches whose rounds take turns in a pool that holds only some of them have each other's prefixes
evicted: every round reads again what the others' have pushed out. So a search holds its share from
its first round to its end, the oldest first, and the others wait. A round needs the paths that it
draws from and what it draws; what else its search may come back to is kept as far as there is room.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from operator import ne


def may_run(needs: Sequence[int], capacity: int) -> list[bool]:
    """Whether each search may run a round; ``needs``: their tokens of KV, the oldest search first.

    One may if it fits beside all older ones that may, and the oldest in any case. So nothing that
    comes later holds a search back, and each runs at the latest when those before it have ended;
    what does not fit keeps no smaller one waiting.
    """
    left, may = capacity, []
    for place, need in enumerate(needs):
        runs = not place or need <= left
        left -= need if runs else 0
        may.append(runs)
    return may


def tokens_of(paths: Iterable[tuple[int, ...]]) -> int:
    """Tokens that a cache of prefixes holds for these paths: what several begin with once."""
    distinct = sorted(set(paths))
    shared = sum(_shared(*neighbours) for neighbours in pairwise(distinct))
    return sum(map(len, distinct)) - shared


def tokens_at_once(
    lengths: Mapping[int, int], *, draws: int, limit: int, pool: int, held: int, longest: int
) -> int:
    """The most tokens to ask for of each of a round's draws; a longer one is asked to go on.

    SGLang lets in together what finds room for all that it may draw, and counts as room whatever no
    request reads at that moment. So steps that end long before their ``limit`` leave most of a pool
    unused, and too many at once evict what the round reads next. Of the lengths that steps have had
    (``lengths``: how many of each), this is the one with which the round takes the fewest passes,
    all of the limit where none takes fewer; never one with which more is drawn at once, on the
    average, than fits the ``pool`` beside what the round reads (``held`` tokens, of which the
    ``longest`` path is in use in any case). A draw takes a place for the last token of its prefix,
    too, which is read anew.
    """
    steps = sum(lengths.values())
    if not steps:
        return limit
    mean = sum(length * many for length, many in lengths.items()) / steps
    room = pool - longest
    best, fewest = limit, _passes(draws, min(limit, max(lengths)), room // (limit + 1))
    longer = 0
    for length in sorted(lengths, reverse=True):
        at_once = room // (length + 1)
        if length < limit and min(at_once, draws) * mean <= pool - held:
            go_on = math.ceil(draws * longer / steps)
            more = _passes(go_on, max(lengths) - length, room // (limit - length + 1))
            passes = _passes(draws, length, at_once) + more
            best, fewest = (length, passes) if passes < fewest else (best, fewest)
        longer += lengths[length]
    return best


def _passes(draws: int, tokens: int, at_once: int) -> int:
    """Of so many draws, so many at once, of so many tokens each; a draw begins with a pass."""
    return math.ceil(draws / max(1, at_once)) * (1 + tokens)


def _shared(path: Sequence[int], other: Sequence[int]) -> int:
    """With how many equal tokens two paths begin."""
    differs = map(ne, path, other)
    return next((at for at, unlike in enumerate(differs) if unlike), min(len(path), len(other)))
