"""What a search's reply begins with, whatever is still to come."""

from __future__ import annotations

from collections.abc import Sequence

from search.events import Event, Started, grow
from search.policies.policy import Backtracking
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from search.tree import Tree


class Foresight:
    """Follows a search by its events.

    The reply is a finished trajectory or grows from an open leaf, so it begins with what all of
    these have in common. A policy that goes back may grow the root again: of its reply nothing is
    certain before the end.
    """

    def __init__(self, spec: SearchSpec) -> None:
        self._tree: Tree | None = None
        self._goes_back = isinstance(POLICIES[spec.policy](spec), Backtracking)

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
        return shared([tree.text(node.id) for node in (*tree.leaves(), *tree.finished())])


def shared(texts: Sequence[str]) -> str:
    """What all texts begin with; of none that is nothing."""
    first, last = min(texts, default=""), max(texts, default="")
    pairs = enumerate(zip(first, last, strict=False))
    return first[: next((i for i, (one, other) in pairs if one != other), len(first))]
