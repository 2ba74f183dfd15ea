"""The output of a benchmark: one JSON document alone on stdout or a table; progress on stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.table import Table

SHORT = 4
"""Digits of a number in a table."""


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)


def say_row(row: Mapping[str, Any], columns: Sequence[str]) -> None:
    """Print a row as a line of progress."""
    say("  ".join(f"{name} {cell_text(row[name])}" for name in columns))


def publish(
    document: Mapping[str, Any], as_json: bool, title: str = "", columns: Sequence[str] = ()
) -> None:
    """Print a document with ``rows`` as JSON, or as a table of those columns that have a value."""
    if as_json:
        print(json.dumps(document, indent=2))
        return
    rows, table = document["rows"], Table(title=title)
    filled_columns = [name for name in columns if any(row[name] is not None for row in rows)]
    for name in filled_columns:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell_text(row[name]) for name in filled_columns))
    Console(width=None if sys.stdout.isatty() else 160).print(table)


def cell_text(value: Any) -> str:
    """A value as the text of a table's cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.{SHORT}g}"
    if isinstance(value, list):
        return " to ".join(cell_text(part) for part in value)
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
