"""What a search's reply begins with, whatever is still to come."""

from __future__ import annotations

from collections.abc import Sequence
from collections.abc import Set as AbstractSet

from search.events import Event, Started, grow
from search.policies.policy import BacktrackingPolicy
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from search.tree import ROOT, Node, Tree


class Foresight:
    """Follows a search by its events.

    The reply is a finished trajectory or grows from an open leaf, so it begins with what all of
    these have in common. A policy that goes back may grow the root again: of its reply nothing is
    certain before the end.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self._tree: Tree | None = None
        self._trunk = ROOT
        """The last node known to be on the way to everything alive, and the text down to it."""
        self._said = ""
        self._goes_back = isinstance(POLICIES[spec.policy](spec), BacktrackingPolicy)

    def hear(self, event: Event) -> None:
        """Take in the search's next event."""
        if isinstance(event, Started):
            self._tree = None if self._goes_back else Tree(event.prompt)
        elif self._tree is not None:
            grow(self._tree, event)

    def text(self) -> str:
        """What the reply begins with. Between rounds; it only ever grows."""
        tree = self._tree
        if tree is None:
            return ""
        alive = tree.above((*tree.leaves(), *tree.finished()))
        while len(below := _below(tree, self._trunk, alive)) == 1:
            self._trunk = below[0].id
            self._said += below[0].text
        return self._said + _common(tree, below, alive)


def _below(tree: Tree, node: int, alive: AbstractSet[int]) -> list[Node]:
    """The children of a node through which something alive is reached."""
    return [tree[child] for child in tree[node].children if child in alive]


def _common(tree: Tree, nodes: Sequence[Node], alive: AbstractSet[int]) -> str:
    """What all that is alive at these siblings and below them says first."""
    start = shared([node.text for node in nodes])
    if all(len(node.text) > len(start) for node in nodes):
        return start
    begun = [node.text + _common(tree, _below(tree, node.id, alive), alive) for node in nodes]
    return shared(begun)


def shared(texts: Sequence[str]) -> str:
    """What all texts begin with; of none that is nothing."""
    first, last = min(texts, default=""), max(texts, default="")
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (one, other) in pairs if one != other), len(first))]
