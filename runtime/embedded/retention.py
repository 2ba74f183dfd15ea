"""Which cached tokens go first when room is short: by age, or by what they are worth to searches.

A step that has ended is a mark in the radix tree, unless nothing that is held may go, and under
``arborkv`` a block of ``kvpolicy.forest`` too. A leaf is worth the most of the blocks that end
there, over all searches; what is trimmed is computed again by the prefill that comes before
decoding. Order decides cost, never a result.
"""

from __future__ import annotations

import time
from typing import Any, Literal

import numpy as np

from kvpolicy.forest import Forest, Rank
from kvpolicy.order import Knobs
from kvpolicy.value import UNFITTED, Theta
from runtime.embedded.radix import HELD, NEXT, UNHELD, Node, RadixTree
from search.engine import Hint
from search.tree import ROOT

KvPolicy = Literal["full", "lru", "arborkv"]
"""``full``: nothing goes that a search holds. ``lru``: what was used longest ago goes first.
``arborkv``: what is worth least."""

MARGIN = 0.02
"""Share of the capacity that a trim frees beyond what is wanted, so that trims are few."""
KNOBS = Knobs(distance_decay=0.0)
"""Best-first search returns to the best open node, however far: a decay by distance lost to lru."""
_NOBODYS: Rank = (False, -np.inf, 0, 0)


class Retention:
    """The KV policy of one radix tree: it hears what searches do and says what to give up."""

    def __init__(
        self, radix: RadixTree, policy: KvPolicy, capacity: int, theta: Theta = UNFITTED
    ) -> None:
        """``capacity``: of the KV store, in tokens."""
        self.keeps_held = policy == "full"
        self.seconds = 0.0
        self.trims = 0
        self._radix = radix
        self._forest = Forest(theta, KNOBS) if policy == "arborkv" else None
        self._margin = int(MARGIN * capacity)

    def begin(self, tree: str, prompt: np.ndarray) -> None:
        """A search's prompt, int64 ids; only the first one counts."""
        if self._forest is not None and tree not in self._forest:
            self._forest.plant(tree, len(prompt))
            self._forest.transition(tree, {}, [ROOT], ())
            self._radix.mark((tree, ROOT), prompt)

    def close(self, tree: str, node: int, parent: int, path: np.ndarray) -> None:
        """A step has ended; ``path``: token ids from the prompt's start to the step's end."""
        if self._forest is None:
            if not self.keeps_held:
                self._radix.mark((tree, node), path)
            return
        blocks = self._forest[tree]
        if node not in blocks:
            above = parent if parent in blocks else ROOT
            self._forest.boundary(tree, node, above, max(1, len(path) - blocks.ends(above)))
        if blocks.alive(node):
            self._radix.mark((tree, node), path)

    def draws(self, tree: str, node: int, path: np.ndarray) -> None:
        """A step under way lost its place: its tokens so far will be read when it goes on."""
        if self._forest is not None:
            self._radix.mark((tree, node), path)

    def drop(self, tree: str, node: int) -> None:
        """A step ended the reply: nothing will be drawn from there."""
        self._radix.unmark((tree, node))

    def hint(self, tree: str, hint: Hint) -> None:
        """A search moved on."""
        before = time.perf_counter()
        for node in hint.dead:
            self._radix.unmark((tree, node))
        if self._forest is not None:
            self._forest.transition(tree, hint.values, hint.active, hint.dead)
        self.seconds += time.perf_counter() - before

    def end(self, tree: str) -> None:
        """A search is over."""
        if self._forest is not None:
            self._forest.fell(tree)
        self._radix.unmark_all(tree)

    def trim(self, wanted: int) -> np.ndarray:
        """Slots of at least ``wanted`` tokens, or of all that may go."""
        before = time.perf_counter()
        if self._forest is None:
            freed = self._radix.trim(wanted, held=not self.keeps_held)
        else:
            freed = self._radix.trim(wanted, self._order, margin=self._margin)
        self.trims += 1
        self.seconds += time.perf_counter() - before
        return freed

    def _order(self, leaf: Node) -> tuple[Any, ...]:
        """What nobody holds by age, then by rank."""
        assert self._forest is not None
        if not leaf.holders:
            return UNHELD, leaf.stamp, leaf.serial
        rank = self._forest.rank
        on_path, *rest = max((rank(*mark) for mark in leaf.marks), default=_NOBODYS)
        return (NEXT if on_path else HELD, *rest, leaf.serial)
