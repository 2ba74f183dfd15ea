"""Parts of the JSON schemas that describe request bodies in the OpenAPI document."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

STRING = {"type": "string"}


def object_of(**properties: Any) -> dict[str, Any]:
    """The schema of an object that must have all these properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}


def of_type(kind: str, **properties: Any) -> dict[str, Any]:
    """The schema of an object with these properties and a ``type`` that must be ``kind``."""
    return object_of(type={"const": kind}, **properties)


def one_spelling_of(*spellings: Sequence[str]) -> dict[str, Any]:
    """The schema of objects that have all fields of one spelling and none of the others'."""
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
