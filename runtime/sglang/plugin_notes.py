"""What servers with our plug-in are told of a search, on its own requests."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from hedgerow_sglang.plugin_protocol import Note, custom_params
from runtime.sglang.replica import PRIORITY_UNITS, Replica
from search.engine import Hint
from search.tree import ROOT


@dataclass(slots=True)
class PluginNotes:
    """The latest hint of a search, and the rewards before it for a server that heard none.

    ``turn`` counts the hints: every request of a round brings the same one.
    """

    tree: str
    turn: int = 0
    hint: Hint = field(default_factory=Hint)
    _values: dict[int, float] = field(default_factory=dict)
    _since: dict[tuple[str, int], int] = field(default_factory=dict)

    def take(self, hint: Hint) -> None:
        """A round begins."""
        self.turn += 1
        self.hint = hint
        self._values.update(hint.values)

    def on(self, server: Replica, prompt: int, step: tuple[int, int] | None) -> dict[str, Any]:
        """Sampling parameters of a request there; empty where there is no plug-in.

        ``prompt``: its tokens; ``step``: the node that is drawn or scored and its parent.
        """
        if not server.plugged:
            return {}
        first = self._since.setdefault((server.url, server.failures), self.turn) == self.turn
        node, parent = step or (None, None)
        note = Note(
            tree=self.tree,
            prompt=max(1, prompt),
            node=node,
            parent=parent,
            turn=self.turn,
            values=self._values if first else self.hint.values,
            active=self.hint.active,
            dead=self.hint.dead,
            outlook=self.hint.outlook,
        )
        return {"custom_params": custom_params(note)}

    def priority(self, server: Replica, parent: int) -> dict[str, int]:
        """A request's priority there: what its parent is worth, the prompt most.

        Empty where nobody evicts by it.
        """
        if not server.ranks:
            return {}
        worth = 1.0 if parent == ROOT else self._values.get(parent, 0.0)
        return {"priority": round(PRIORITY_UNITS * worth)}


def farewell(tree: str) -> Mapping[str, Any]:
    """A request with nothing to do but to say that a search is over."""
    note = Note(tree=tree, prompt=1, over=(tree,))
    return {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 0, "custom_params": custom_params(note)},
    }
