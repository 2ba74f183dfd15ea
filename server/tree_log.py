"""``--trees FILE``: writes every searched tree as a line of JSON."""

from __future__ import annotations

import asyncio
import json
import logging
import threading
from collections.abc import Callable
from contextlib import suppress
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from typing import Any, Self

log = logging.getLogger("hedgerow.trees")

WRITE_SECONDS = 0.1
"""The most seconds that a response waits for its tree to be written."""
MOST_WAITING = 64 << 20
"""The most bytes of lines that may wait for a blocked file."""
CLOSE_SECONDS = 5.0
"""The most seconds to write waiting lines at the end."""

OnWritten = Callable[[bool], None]


class TreeLog:
    """Appends documents to a file, a line each; without a path it does nothing."""

    def __init__(self, path: Path | None) -> None:
        """Raises OSError if the file cannot be opened for writing.

        ``enabled``: whether trees are written at all.
        """
        self.enabled = path is not None
        self._file: FileIO | None = path.open("ab", buffering=0) if path else None
        self._torn = False
        self._reported = False
        self._lines: SimpleQueue[tuple[bytes, OnWritten] | None] = SimpleQueue()
        self._writer: threading.Thread | None = None
        self._waiting = 0
        self._behind = False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._writer is not None:
            self._lines.put(None)
            self._writer.join(CLOSE_SECONDS)
            if self._writer.is_alive():
                log.error("trees are lost: %d bytes of them still wait", self._waiting)
                return  # the thread still uses the file
        if self._file is not None:
            self._file.close()

    def write(self, document: dict[str, Any]) -> bool:
        """Write one tree to the file before returning; return False if that failed.

        The first failure is logged. The next tree starts a new line after a partly written one.
        """
        return self._file is None or self._write(self._file, _line(document))

    async def write_beside(self, document: dict[str, Any], on_loss: Callable[[], None]) -> None:
        """Write one tree in a thread, since the file may block, such as a pipe that nobody reads.

        The tree is usually written when this returns; while the file is behind, this does not wait.
        ``on_loss`` is called, in any thread, for a tree that could not be written, or that found
        MOST_WAITING bytes waiting.
        """
        if self._file is None:
            return
        line, loop = _line(document), asyncio.get_running_loop()
        if self._waiting + len(line) > MOST_WAITING:
            self._tell(self._file, "it stands still")
            on_loss()
            return
        write_done: asyncio.Future[None] = loop.create_future()

        def make_room() -> None:
            self._waiting -= len(line)
            self._behind = self._waiting > 0
            if not write_done.done():
                write_done.set_result(None)

        def on_written(ok: bool) -> None:
            if not ok:
                on_loss()
            with suppress(RuntimeError):  # the loop may be closed by now
                loop.call_soon_threadsafe(make_room)

        self._waiting += len(line)
        self._lines.put((line, on_written))
        if self._writer is None:
            target = self._write_lines
            self._writer = threading.Thread(target=target, name="hedgerow-trees", daemon=True)
            self._writer.start()
        if not self._behind:
            try:
                async with asyncio.timeout(WRITE_SECONDS):
                    await write_done
            except TimeoutError:
                self._behind = True

    def _write_lines(self) -> None:
        while (item := self._lines.get()) is not None:
            line, on_written = item
            assert self._file is not None, "lines wait for a file"
            on_written(self._write(self._file, line))

    def _write(self, file: FileIO, line: bytes) -> bool:
        remaining = memoryview(b"\n" + line if self._torn else line)
        try:
            while remaining:
                remaining = remaining[file.write(remaining) :]
                self._torn = bool(remaining)
        except OSError as error:
            self._tell(file, str(error))
            return False
        return True

    def _tell(self, file: FileIO, why: str) -> None:
        if not self._reported:
            log.error("trees are lost: %s cannot be written: %s", file.name, why)
        self._reported = True


def _line(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":")).encode() + b"\n"
