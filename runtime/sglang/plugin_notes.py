"""What servers with our plug-in are told of a search, on its own requests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hedgerow_sglang.plugin_protocol import Note, custom_params
from runtime.sglang.replica import Replica
from runtime.sglang.request_priority import PRIORITY_UNITS
from search.engine import Hint
from search.tree import ROOT


@dataclass(slots=True)
class PluginNotes:
    """A search's hints, and what each server has heard of them.

    Hints are numbered from 1 on: a round's is its ``turn``. A server hears each one once, with the
    first request of a round that goes there; with it come those that it has missed.
    """

    tree: str
    _hints: list[Hint] = field(default_factory=list)
    _values: dict[int, float] = field(default_factory=dict)
    _turns: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """By server and life: the turn up to which it had heard all before this one, and this one."""

    @property
    def turn(self) -> int:
        """The round under way."""
        return len(self._hints)

    def take(self, hint: Hint) -> None:
        """A round begins."""
        self._hints.append(hint)
        self._values.update(hint.values)

    def about(self, server: Replica, prompt: int, step: tuple[int, int] | None) -> dict[str, Any]:
        """Sampling parameters of a request there; empty where there is no plug-in.

        ``prompt``: its tokens; ``step``: the node that is drawn or scored and its parent.
        """
        return {"custom_params": custom_params(self._note(prompt, step))} if server.plugged else {}

    def on(self, server: Replica, prompt: int, step: tuple[int, int] | None) -> dict[str, Any]:
        """As ``about``, with what the server is still to hear: for requests that go there in the
        order in which they are asked for."""
        hint = self._due_hint(server) if server.plugged else None
        if hint is None:
            return self.about(server, prompt, step)
        note = self._note(prompt, step)._replace(
            values=hint.values, active=hint.active, dead=hint.dead, outlook=hint.outlook
        )
        return {"custom_params": custom_params(note)}

    def _note(self, prompt: int, step: tuple[int, int] | None) -> Note:
        node, parent = step or (None, None)
        return Note(self.tree, max(1, prompt), node, parent, self.turn)

    def _due_hint(self, server: Replica) -> Hint | None:
        """What a server has not heard yet; one with several schedulers never has."""
        if not self._hints:
            return None
        life = server.url, server.failures
        before, now = self._turns.get(life, (0, 0))
        if now < self.turn:
            before, now = now, self.turn
            self._turns[life] = before, now
        elif server.schedulers == 1:
            return None
        last = self._hints[-1]
        if not before:
            return Hint(self._values, last.active, last.dead, last.outlook)
        missed_hints = self._hints[before:]
        values = {node: value for hint in missed_hints for node, value in hint.values.items()}
        dead = tuple(node for hint in missed_hints for node in hint.dead)
        return Hint(values, last.active, dead, last.outlook)

    def priority(self, server: Replica, parent: int) -> dict[str, int]:
        """A request's priority there: what its parent is worth, the prompt most.

        Empty where nobody evicts by it.
        """
        if not server.ranks:
            return {}
        worth = 1.0 if parent == ROOT else self._values.get(parent, 0.0)
        return {"priority": round(PRIORITY_UNITS * worth)}
