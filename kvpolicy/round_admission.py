"""Which searches may run a round on a server, by what each needs of its KV.

Searches whose rounds take turns in a pool that holds only some of them have each other's prefixes
evicted: every round reads again what the others' have pushed out. So a search holds its share from
its first round to its end, the oldest first, and the others wait.
"""

from __future__ import annotations

from collections.abc import Sequence


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
