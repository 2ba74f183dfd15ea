"""How a search gets on, in words, for clients that show a model's reasoning."""

from __future__ import annotations

from search.events import Answered, Event, Expanded, Finished, Scored

LONGEST_STEP = 80


class Progress:
    """Sums up each round of a search in a line once the next begins."""

    def __init__(self) -> None:
        self._round = 0
        self._steps: dict[int, str] = {}
        self._best: tuple[float, str] | None = None
        self._finished = 0

    def hear(self, event: Event) -> str | None:
        """Take in an event; the line of the round that is over with it, if one is."""
        number = getattr(event, "round", self._round)
        over = isinstance(event, Answered) or number != self._round
        line = self._line() if over and self._steps else None
        if over:
            self._round, self._steps, self._best = number, {}, None
        match event:
            case Expanded():
                self._steps[event.node] = " ".join(event.text.split())[:LONGEST_STEP]
            case Scored() if self._best is None or event.reward > self._best[0]:
                self._best = event.reward, self._steps[event.node]
            case Finished():
                self._finished += 1
        return line

    def _line(self) -> str:
        best = "" if self._best is None else f"; best {self._best[0]:.2f}: {self._best[1]}"
        return f"round {self._round}: {len(self._steps)} steps, {self._finished} finished{best}\n"
