"""``--trees FILE``: every searched tree as one line of JSON."""

from __future__ import annotations

import json
import logging
from io import FileIO
from pathlib import Path
from types import TracebackType
from typing import Any, Self

log = logging.getLogger("hedgerow.trees")


class TreeLog:
    """Appends documents to a file, a line each; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError if the file cannot be opened for writing."""
        self._file: FileIO | None = path.open("ab", buffering=0) if path else None
        self._torn = False
        self._told = False

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

    def write(self, document: dict[str, Any]) -> bool:
        """One tree; it is in the file when this returns, unless False: it could not be written.

        That is logged once. What was written of its line is no part of the next one's.
        """
        if self._file is None:
            return True
        line = json.dumps(document, separators=(",", ":")).encode() + b"\n"
        left = memoryview(b"\n" + line if self._torn else line)
        try:
            while left:
                left = left[self._file.write(left) :]
                self._torn = bool(left)
        except OSError as error:
            if not self._told:
                log.error("trees are lost: %s cannot be written: %s", self._file.name, error)
            self._told = True
            return False
        return True
