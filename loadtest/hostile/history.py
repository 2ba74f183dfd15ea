"""Requests and how they ended: the facts that promises are checked against."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DOCUMENTED = frozenset({503, 504})
"""Errors of a server that the document names: no engine just now, nothing in time."""
HUNG = -1
"""The status of a request that did not end in time."""


@dataclass(frozen=True, slots=True)
class Asked:
    """One request and its end.

    ``sent``: the request, seed included; the same text must have the same ``digest``, unless a
    ``deadline`` has cut it, which depends on the clock. ``status``: of HTTP; 0 if the connection
    ended without one, ``HUNG`` if it did not end. ``error``: the code of a typed error.
    ``billed`` and ``drawn``: tokens of the usage and of the tree, -1 where unknown.
    """

    sent: str
    status: int
    error: str = ""
    digest: str = ""
    billed: int = -1
    drawn: int = -1
    seconds: float = 0.0
    deadline: bool = False


def checked(history: Sequence[Asked], *, answers: bool = True) -> dict[str, Any]:
    """Counts of a history; ``broken``: how often each promise was broken.

    ``answers``: every request is complete, so no connection may end without an answer.
    """
    digests: defaultdict[str, set[str]] = defaultdict(set)
    whole = [entry for entry in history if entry.digest and not entry.deadline]
    for entry in whole:
        digests[entry.sent].add(entry.digest)
    repeats = Counter(entry.sent for entry in whole)
    broken = {
        "undocumented_5xx": sum(
            entry.status >= 500 and entry.status not in DOCUMENTED for entry in history
        ),
        "untyped_errors": sum(entry.status >= 400 and not entry.error for entry in history),
        "hung": sum(entry.status == HUNG for entry in history),
        "lost": sum(entry.status == 0 for entry in history) if answers else 0,
        "digests_differ": sum(len(variants) > 1 for variants in digests.values()),
        "billed_is_not_drawn": sum(
            entry.billed != entry.drawn for entry in history if entry.drawn >= 0
        ),
    }
    return {
        "requests": len(history),
        "statuses": dict(sorted(Counter(entry.status for entry in history).items())),
        "pairs": sum(count - 1 for count in repeats.values()),
        "cut_by_deadline": sum(entry.deadline for entry in history),
        "broken": {name: count for name, count in broken.items() if count},
    }


class StageHistory:
    """A stage's history and measured facts on disk, so that an interrupted run can go on."""

    def __init__(self, folder: Path, stage: str) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._history = folder / f"{stage}.jsonl"
        self._facts = folder / f"{stage}.json"

    def read(self) -> list[Asked]:
        """The requests on disk; an incomplete last line is ignored."""
        if not self._history.is_file():
            return []
        lines = self._history.read_text().split("\n")[:-1]
        return [Asked(**json.loads(line)) for line in lines]

    def once(self, run: Callable[[], list[Asked]]) -> list[Asked]:
        """The requests on disk; without any, those that ``run`` returns, which are stored."""
        history = self.read()
        if not history:
            history = run()
            self.add(history)
        return history

    def add(self, entries: Iterable[Asked]) -> None:
        """Append requests to the history."""
        with self._history.open("a") as file:
            for entry in entries:
                file.write(json.dumps(asdict(entry)) + "\n")

    @property
    def facts(self) -> dict[str, Any]:
        """The facts noted so far, by name."""
        return json.loads(self._facts.read_text()) if self._facts.is_file() else {}

    def note(self, **facts: Any) -> None:
        """Store facts by name, replacing those of the same names."""
        self._facts.write_text(json.dumps(self.facts | facts))
