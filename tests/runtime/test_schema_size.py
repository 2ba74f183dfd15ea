"""Patterns whose nested repeats multiply are refused before they are compiled."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.json_schemas import SchemaRefused, must_compile
from runtime.schema_size import MOST_OF_PATTERNS, patterns_size, unrolled_size


@pytest.mark.parametrize(
    ("pattern", "size"),
    [
        ("abc", 3),
        (r"^\d{4}-\d{2}$", 9),
        ("[a-z{5}]{3}", 3),
        ("[]]{2}(ab){3}", 8),
        ("(a{10}b){10}", 110),
        ("((a{100}){100}){100}", 1_000_000),
        ("a{2,5}b{3,}", 8),
        (r"\({4}a{}", 7),
        ("a+(b*|c?){2}", 5),
    ],
)
def test_by_hand(pattern: str, size: int) -> None:
    """Escapes and classes are one each; a repeat counts as often as it may be there."""
    assert unrolled_size(pattern) == size


Pattern = tuple[str, int]
atoms = st.sampled_from([("a", 1), (r"\w", 1), ("[^)}]", 1)])


def _joined(parts: list[Pattern]) -> Pattern:
    return "".join(text for text, _ in parts), sum(size for _, size in parts)


def _repeated(repeat: tuple[Pattern, int]) -> Pattern:
    (text, size), times = repeat
    return f"({text}){{{times}}}", size * times


patterns = st.recursive(
    atoms,
    lambda inner: (
        st.lists(inner, min_size=1, max_size=4).map(_joined)
        | st.tuples(inner, st.integers(1, 30)).map(_repeated)
    ),
    max_leaves=12,
)


@given(patterns)
def test_repeats_multiply(sized_pattern: Pattern) -> None:
    """A pattern's size is multiplied by its repeats, for any nesting."""
    pattern, size = sized_pattern
    assert unrolled_size(pattern) == size
    assert (
        patterns_size({"anyOf": [{"pattern": pattern}, {"patternProperties": {pattern: {}}}]})
        == 2 * size
    )


@given(st.text(alphabet="()[]{}\\^$|*+?,a1", max_size=30))
def test_nonsense_has_a_size(pattern: str) -> None:
    """Any string has a size; invalid patterns are refused elsewhere."""
    assert unrolled_size(pattern) >= 0


@pytest.mark.promise(
    "The server refuses a JSON schema that would take long to compile, judging by the size of its "
    "patterns."
)
@pytest.mark.parametrize(
    "schema",
    [
        {"type": "string", "pattern": "^((((a{100}){100}){100}){100}){100}$"},
        {"type": "string", "pattern": "^a*$", "minLength": 100_000},
        {"patternProperties": {"^(ab{1000}){1000}$": {"type": "string"}}},
    ],
)
def test_it_is_refused_by_its_size(schema: dict) -> None:
    with pytest.raises(SchemaRefused, match=f"at most {MOST_OF_PATTERNS}"):
        must_compile(json.dumps(schema))
