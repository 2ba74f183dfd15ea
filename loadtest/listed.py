"""Options of a benchmark: readers of counts, and of several values."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection
from typing import Any


def at_least_1(text: str) -> int:
    """A reader of counts."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text}: must be at least 1")
    return value


def listed(kind: type, known: Collection[str] = ()) -> Callable[[str], list[Any]]:
    """A reader of values separated by commas: of those known, or numbers above 0."""

    def read(text: str) -> list[Any]:
        try:
            values = list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be numbers, by commas") from None
        for value in values:
            if known and value not in known:
                raise argparse.ArgumentTypeError(f"{value}: known are {', '.join(known)}")
            if not known and not 0 < value < float("inf"):
                raise argparse.ArgumentTypeError(f"{text}: must be values above 0")
        return values

    return read
