"""Results of searches kept in a file, so that a comparison of hours goes on where it stopped.

A line holds what it was searched with and what came out. Only a result of the same spec, item,
models, engine options and search code is taken back: whatever else stands in the file is left.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pydantic import TypeAdapter

import search
from cli.kept_lines import KeptLines
from loadtest.searches import Item, Method
from search.policies.policy import Round
from search.stats import SearchStats


@dataclass(frozen=True, slots=True)
class Result:
    """What a method made of one item: right or not, the numbers and the digest; the tree itself is
    let go.

    ``illegal``: whether the chosen reply has a step that the rules forbid, None where there is no
    reply. ``rounds``: its decisions, for who wants to repeat them.
    """

    correct: bool
    any_correct: bool
    illegal: bool | None
    stats: SearchStats
    digest: str
    rounds: tuple[Round, ...]


RESULT = TypeAdapter(Result)


def code_of(*packages: ModuleType) -> str:
    """A hash of all that stands in some packages' files."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class KeptResults:
    """The results in a file (none if ``path`` is None) that ``fingerprint``'s engine gave, with
    the code that decides how a tree grows, engine apart."""

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self._lines = KeptLines(path, f"{fingerprint} {code_of(search)}", RESULT)

    def get(self, item: Item, method: Method, with_rounds: bool) -> Result | None:
        """What this search gave before, if it is known (and its decisions, if they are wanted)."""
        result = self._lines.get(of_search(item, method))
        if result is None or (with_rounds and not result.rounds):
            return None
        return result

    def put(self, item: Item, method: Method, result: Result) -> None:
        """Add a result, at once."""
        self._lines.put(of_search(item, method), result)


def of_search(item: Item, method: Method) -> str:
    """What a search is kept by: its method's name and spec, its item."""
    spec = method.spec.model_dump_json(exclude_none=True)
    return f"{method.name} {spec} {item.task} {item.seed} {item.question}"
