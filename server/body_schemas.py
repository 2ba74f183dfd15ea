"""Pieces of the JSON schemas by which the API's document describes bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STRING = {"type": "string"}


def object_of(**properties: Any) -> dict[str, Any]:
    """An object that must have all of these."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def of_type(kind: str, **properties: Any) -> dict[str, Any]:
    """The same, with a ``type`` that says which of several kinds it is."""
    return object_of(type={"const": kind}, **properties)


def one_spelling_of(*spellings: Sequence[str]) -> dict[str, Any]:
    """Objects that have the fields of exactly one spelling, and none of another's."""
    names = {name for spelling in spellings for name in spelling}
    return {
        "oneOf": [
            {
                "required": list(spelling),
                "properties": {name: {"not": {"type": "null"}} for name in spelling}
                | {name: {"type": "null"} for name in sorted(names - set(spelling))},
            }
            for spelling in spellings
        ]
    }
