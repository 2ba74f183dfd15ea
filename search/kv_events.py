"""What a listener is told of an engine's KV. It watches; nothing of it reaches the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from search.engine import KvMoved
from search.events import Event, Evicted, KvHeld, Rehydrated
from search.stats import path_length
from search.tree import ROOT, Tree


class KvEvents:
    """Turns what an engine says of paths into events of steps. Whatever is new is held whole."""

    def __init__(self, tree: Tree, emit: Callable[[Event], None]) -> None:
        self._tree = tree
        self._emit = emit
        self._kept: dict[int, int] = {}
        self._unborn: dict[int, int] = {}
        self._told = False

    def dead(self, number: int, nodes: Iterable[int]) -> None:
        """In this round the engine was told that nobody comes back to these nodes.

        Nothing is said of an engine that has not spoken of its KV.
        """
        for node in nodes if self._told else ():
            if self._kept.get(node) != 0:
                self._kept[node] = 0
                self._emit(Evicted(number, node, 0, "dead"))

    def round(self, number: int, moved: KvMoved, active: int) -> None:
        """A round is in the tree; ``active``: unique tokens of the paths it grew from."""
        self._told = True
        cached = {**self._unborn, **moved.cached}
        self._unborn = {node: at for node, at in cached.items() if node >= len(self._tree)}
        for node in sorted(cached.keys() - self._unborn.keys() - {ROOT}):
            self._tell(number, node, cached[node])
        active = min(active, moved.held)
        self._emit(KvHeld(number, active, moved.held - active, moved.capacity))

    def _tell(self, number: int, id_: int, cached: int) -> None:
        """``cached``: tokens of the node's whole path."""
        node, tree = self._tree[id_], self._tree
        above = len(tree.prompt) + path_length(tree, node.parent)
        kept = min(max(cached - above, 0), len(node.tokens))
        before = self._kept.get(id_, len(node.tokens))
        self._kept[id_] = kept
        if kept < before:
            self._emit(Evicted(number, id_, kept, "room"))
        elif kept > before:
            self._emit(Rehydrated(number, id_, kept))
