"""Notes for servers with our plug-in, which travel on a search's own requests."""

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
    """A search's hints, and which of them each server has received.

    Hints are numbered from 1; a round's number is its ``turn``. A server receives a hint once, with
    the first request of a round that goes there, together with those that it has missed.
    """

    tree: str
    _hints: list[Hint] = field(default_factory=list)
    _values: dict[int, float] = field(default_factory=dict)
    _turns: dict[tuple[str, int], tuple[int, int]] = field(default_factory=dict)
    """By server and its losses: the turn that it had heard up to before this one, and this one."""

    @property
    def turn(self) -> int:
        """The number of the current round."""
        return len(self._hints)

    def take(self, hint: Hint) -> None:
        """Record the hint of a new round."""
        self._hints.append(hint)
        self._values.update(hint.values)

    def about(self, server: Replica, prompt: int, step: tuple[int, int] | None) -> dict[str, Any]:
        """Sampling parameters with the note of a request there; empty without the plug-in.

        ``prompt``: its tokens; ``step``: the node that is drawn or scored and its parent.
        """
        return {"custom_params": custom_params(self._note(prompt, step))} if server.plugged else {}

    def on(self, server: Replica, prompt: int, step: tuple[int, int] | None) -> dict[str, Any]:
        """``about`` with the hint that the server has not received yet: for requests that are sent
        in the order of these calls."""
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
        """The hint a server has not received, None for none; with several schedulers always one."""
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
        """A request's priority there: its parent's reward, scaled; the prompt's is the highest.

        Empty if the server does not evict by priority.
        """
        if not server.ranks:
            return {}
        worth = 1.0 if parent == ROOT else self._values.get(parent, 0.0)
        return {"priority": round(PRIORITY_UNITS * worth)}
