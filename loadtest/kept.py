"""Results of searches kept in a file, so that a comparison of hours goes on where it stopped.

A line holds what it was searched with and what came out. Only a result of the same spec, item,
models, engine options and search code is taken back: whatever else stands in the file is left.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

from pydantic import TypeAdapter

import search
from loadtest.result import Result
from loadtest.searches import Item, Method

RESULT = TypeAdapter(Result)


def search_code() -> str:
    """A hash of everything that decides how a tree grows, engine apart."""
    folder = Path(search.__path__[0])
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


class Kept:
    """The results in a file (none if ``path`` is None) that ``fingerprint``'s engine gave."""

    def __init__(self, path: Path | None, fingerprint: str) -> None:
        self._path = path
        self._made_by = f"{fingerprint} {search_code()}"
        self._found: dict[str, Result] = {}
        lines = path.read_text().splitlines() if path is not None and path.is_file() else []
        for line in _whole(lines):
            row = json.loads(line)
            if row["made_by"] == self._made_by:
                self._found[row["of"]] = RESULT.validate_python(row["result"])

    def get(self, item: Item, method: Method, with_rounds: bool) -> Result | None:
        """What this search gave before, if it is known (and its decisions, if they are wanted)."""
        result = self._found.get(_of(item, method))
        if result is None or (with_rounds and not result.rounds):
            return None
        return result

    def put(self, item: Item, method: Method, result: Result) -> None:
        """Add a result, at once."""
        if self._path is None:
            return
        row = {
            "made_by": self._made_by,
            "of": _of(item, method),
            "result": RESULT.dump_python(result, mode="json"),
        }
        with self._path.open("a") as out:
            out.write(json.dumps(row) + "\n")


def _of(item: Item, method: Method) -> str:
    spec = method.spec.model_dump_json(exclude_none=True)
    return f"{method.name} {spec} {item.task} {item.seed} {item.question}"


def _whole(lines: Iterable[str]) -> Iterable[str]:
    """The lines that were written to their end."""
    return (line for line in lines if line.endswith("}"))
