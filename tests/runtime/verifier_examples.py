"""Verifiers as somebody may write them, for better or worse."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

Batch = Sequence[Mapping[str, Any]]


def length(batch: Batch) -> list[float]:
    """The shorter the last step, the better; it prints, as people do."""
    print("looking at", len(batch), "steps")
    return [1.0 / (1 + len(one["steps"][-1])) for one in batch]


def questions(batch: Batch) -> list[float]:
    """Whether the first step speaks of the question."""
    return [float(one["question"] in one["steps"][0]) for one in batch]


def one(batch: Batch) -> list[float]:
    """Nothing is wrong with any."""
    return [1.0 for _ in batch]


one.pure = True  # pyright: ignore[reportFunctionMemberAccess]


def odd(batch: Batch) -> object:
    """What the first step's text names goes wrong."""
    match batch[0]["steps"][0]:
        case "raise":
            raise LookupError("the table is empty")
        case "nan":
            return [math.nan] * len(batch)
        case "short":
            return [1.0] * (len(batch) - 1)
        case "large":
            return [1.5] * len(batch)
        case "none":
            return None
        case "words":
            return ["good"] * len(batch)
        case "exit":
            os._exit(3)
        case "hang":
            threading.Event().wait()
    return one(batch)


class Checks:
    """A name inside a module may be a path."""

    half = staticmethod(lambda batch: [0.5 for _ in batch])
