"""Measures regular expressions in a JSON schema, whose nested repeats may take long to compile."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

MOST_OF_PATTERNS = 50_000
"""Most characters and classes of all patterns of a schema, with their repeats written out."""
FLOOR_COST = 4
"""Size counted for each character of ``minLength`` beside a pattern: the two are intersected."""
_REPEAT = re.compile(r"\{(\d{1,9})(?:,(\d{0,9}))?\}")
_CLASS = re.compile(r"\[\^?\]?(?:\\.|[^\]\\])*\]?", re.DOTALL)


def patterns_size(schema: Any) -> int:
    """The characters and classes of a schema's patterns, their repeats written out."""
    return sum(map(_own_size, _objects(schema)))


def _objects(schema: Any) -> Iterator[dict[str, Any]]:
    """Every object in a schema, found without recursion."""
    stack = [schema]
    while stack:
        part = stack.pop()
        if isinstance(part, dict):
            yield part
            stack += part.values()
        elif isinstance(part, list):
            stack += part


def _own_size(part: dict[str, Any]) -> int:
    pattern, by_pattern = part.get("pattern"), part.get("patternProperties")
    size = sum(map(unrolled_size, by_pattern)) if isinstance(by_pattern, dict) else 0
    if isinstance(pattern, str):
        size += unrolled_size(pattern)
    floor = part.get("minLength")
    if isinstance(floor, int) and (isinstance(pattern, str) or "format" in part):
        size += FLOOR_COST * floor
    return size


def unrolled_size(pattern: str) -> int:
    """How many characters and classes a regular expression has with its repeats written out; a
    repeat without an upper bound counts with its lower one."""
    totals, atoms, at = [0], [0], 0
    while at < len(pattern):
        letter, repeat = pattern[at], _REPEAT.match(pattern, at)
        if letter == "(":
            totals.append(0)
            atoms.append(0)
            at += 1
            continue
        if letter in "*+?|":
            at += 1
            continue
        if repeat is not None:
            least, most = repeat.groups()
            times = max(1, int(most or least))
            totals[-1] += atoms[-1] * (times - 1)
            atoms[-1] *= times
            at = repeat.end()
            continue
        size = 1
        if letter == ")" and len(totals) > 1:
            size = totals.pop()
            atoms.pop()
        totals[-1] += size
        atoms[-1] = size
        at = _end_of_atom(pattern, at)
    return sum(totals)


def _end_of_atom(pattern: str, at: int) -> int:
    """The place behind the escape, class or character at ``at``."""
    if pattern[at] == "\\":
        return at + 2
    match = _CLASS.match(pattern, at)
    return at + 1 if match is None else match.end()
