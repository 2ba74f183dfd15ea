"""Examples of custom verifiers, good and faulty."""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Mapping, Sequence
from typing import Any

Batch = Sequence[Mapping[str, Any]]


def length(batch: Batch) -> list[float]:
    """Scores that fall with the last step's length; prints to stdout, as user code may."""
    print("looking at", len(batch), "steps")
    return [1.0 / (1 + len(judged["steps"][-1])) for judged in batch]


def questions(batch: Batch) -> list[float]:
    """1.0 if the first step contains the question, else 0.0."""
    return [float(judged["question"] in judged["steps"][0]) for judged in batch]


def one(batch: Batch) -> list[float]:
    """1.0 for every path."""
    return [1.0 for _ in batch]


one.pure = True  # pyright: ignore[reportFunctionMemberAccess]


def odd(batch: Batch) -> object:
    """Fail in the way that the first step's text names; else 1.0 for every path."""
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
    """Holds a verifier that is named by a dotted path in its module."""

    half = staticmethod(lambda batch: [0.5 for _ in batch])
