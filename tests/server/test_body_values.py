"""Tests of ``server.connections``: values in a JSON body are counted before it is parsed."""

from __future__ import annotations

import json
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.connections import COMMAS, DIGITS, at_most, outside_strings

TEXT = st.text(st.sampled_from('",\\[]{}: a\né'), max_size=12)
DOCUMENTS = st.recursive(
    TEXT | st.integers() | st.none(),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(TEXT, inner, max_size=5),
)


@given(DOCUMENTS, st.booleans())
def test_commas_outside_strings_are_between_values(document: object, ascii_only: bool) -> None:
    body = json.dumps(document, ensure_ascii=ascii_only).encode()
    assert outside_strings(body, COMMAS) == _separators(document)
    assert outside_strings(body, DIGITS) <= at_most(body, DIGITS)


def test_what_is_no_document_is_counted_too() -> None:
    assert outside_strings(b'["', COMMAS) == 0
    assert outside_strings(b"[1,2,", COMMAS) == 2


def test_digits_of_numbers_and_of_strings() -> None:
    body = b'{"12": "3,4", "five": 678}'
    assert outside_strings(body, DIGITS) == 3
    assert at_most(body, DIGITS) == 7


def _separators(value: Any) -> int:
    if not isinstance(value, list | dict):
        return 0
    inner = value.values() if isinstance(value, dict) else value
    return max(0, len(value) - 1) + sum(map(_separators, inner))
