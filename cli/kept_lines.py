"""Keeps results in a file, a line each, so that a run of hours can continue after a stop."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import TypeAdapter

Value = TypeVar("Value")


class KeptLines(Generic[Value]):
    """The results in a file (none if ``path`` is None) that ``maker`` made, by their keys.

    Lines of other makers are kept but not read. A line that was not written to its end is ignored.
    """

    def __init__(self, path: Path | None, maker: str, kind: TypeAdapter[Value]) -> None:
        """Raises ValueError naming the line for a file that holds something else."""
        self._path = path
        self._maker = maker
        self._kind = kind
        self._values: dict[str, Value] = {}
        text = path.read_text(encoding="utf-8") if path is not None and path.is_file() else ""
        self._torn = bool(text) and not text.endswith("\n")
        for row in _rows(path, text):
            if row["made_by"] == maker:
                self._values[row["of"]] = kind.validate_python(row["result"])

    def get(self, of: str) -> Value | None:
        """The result for the key ``of``, None if there is none."""
        return self._values.get(of)

    def put(self, of: str, value: Value) -> None:
        """Store a result and append its line to the file immediately."""
        self._values[of] = value
        if self._path is None:
            return
        document = self._kind.dump_python(value, mode="json")
        line = json.dumps({"made_by": self._maker, "of": of, "result": document})
        with self._path.open("a", encoding="utf-8") as out:
            out.write("\n" * self._torn + line + "\n")
        self._torn = False


def _rows(path: Path | None, text: str) -> Iterator[dict[str, Any]]:
    """Parse the complete lines. Raises ValueError for a line that is not of this format."""
    for number, line in enumerate(text.splitlines(), 1):
        try:
            row = json.loads(line)
        except json.JSONDecodeError:
            continue
        if not isinstance(row, dict) or not {"made_by", "of", "result"} <= row.keys():
            raise ValueError(f"{path}, line {number}: no result that was kept; name another file")
        yield row
