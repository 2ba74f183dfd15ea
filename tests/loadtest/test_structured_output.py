"""The suite of schemas: read from a package's wheel, and which replies count as valid."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from loadtest.structured_output import Conversation, compiled, spread, suite, valid

DICT = {"type": "dict", "properties": {"sizes": {"type": "tuple", "items": {"type": "float"}}}}
OBJECT = {"type": "object", "properties": {"sizes": {"type": "array", "items": {"type": "number"}}}}


def test_each_schema_is_read_once(tmp_path: Path) -> None:
    """It has JSON Schema's type names and its question; files of answers and others are ignored."""
    lines = [{"question": "How?", "function": [{"name": "f", "parameters": DICT}] * 2}, {"id": 1}]
    text = "\n".join(map(json.dumps, lines))
    wheel = tmp_path / "package.whl"
    with zipfile.ZipFile(wheel, "w") as files:
        files.writestr("data/simple.json", text + "\n}")
        files.writestr("data/possible_answer/simple.json", text.replace("sizes", "other"))
        files.writestr("data/readme.md", text.replace("sizes", "third"))
    [conversation] = suite(wheel)
    assert conversation.schema == OBJECT
    assert "How?" in conversation.question


def test_what_is_refused_is_counted_by_its_reason() -> None:
    """A schema that does not compile is counted by its reason and left out."""
    good, bad = Conversation(OBJECT, "?"), Conversation({"uniqueItems": True}, "?")
    row, accepted = compiled([good, bad])
    assert accepted == [good]
    assert (row["schemas"], row["compiled"], row["share"]) == (2, 1, 0.5)
    assert [*row["refused"]] == ['Unimplemented keys: ["uniqueItems"]']


def test_a_number_of_any_size_is_a_number() -> None:
    """JSON has no largest number; truncated text or another type is not valid."""
    assert valid(OBJECT, '{"sizes": [1e999, -2]}')
    assert not valid(OBJECT, '{"sizes": ["1"]}')
    assert not valid(OBJECT, '{"sizes": [')


def test_a_part_of_the_suite_is_from_all_over_it() -> None:
    """A part has every n-th schema, since files are ordered by the kind of function."""
    conversations = [Conversation({"const": i}, "?") for i in range(10)]
    assert [conversation.schema["const"] for conversation in spread(conversations, 3)] == [0, 3, 6]
    assert spread(conversations, 99) == conversations
