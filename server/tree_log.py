"""``--trees FILE``: every searched tree as one line of JSON."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TextIO


class TreeLog:
    """Appends documents to a file, a line each; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError if the file cannot be written."""
        self._file: TextIO | None = path.open("a", encoding="utf-8") if path else None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._file is not None:
            self._file.close()

    @property
    def wanted(self) -> bool:
        """Whether anybody asked for the trees."""
        return self._file is not None

    def write(self, document: dict[str, Any]) -> None:
        """One tree; it is in the file when this returns."""
        if self._file is not None:
            self._file.write(json.dumps(document, separators=(",", ":")) + "\n")
            self._file.flush()
