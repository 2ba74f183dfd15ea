"""Stop strings: found with the token that completes them, at a cost that follows their length."""

from __future__ import annotations

import time

from hypothesis import given
from hypothesis import strategies as st

from runtime.stop_strings import StopStringTables

PIECES = st.lists(st.text("ab\n€", max_size=4).map(str.encode), min_size=1, max_size=12)
STOPS = st.lists(st.text("ab\n€", min_size=1, max_size=6), max_size=4).map(tuple)


@given(PIECES, STOPS, st.data())
def test_a_stop_is_found_with_the_token_that_completes_it(
    pieces: list[bytes], stops: tuple[str, ...], data: st.DataObject
) -> None:
    """A stop is found exactly if a stop string ends within the bytes that the last token added."""
    finder = StopStringTables(pieces).of(stops)
    tokens = data.draw(st.lists(st.integers(0, len(pieces) - 1), min_size=1, max_size=12))
    for count in range(1, len(tokens) + 1):
        before = b"".join(pieces[token] for token in tokens[: count - 1])
        text = before + pieces[tokens[count - 1]]
        ends = range(len(before) + 1, len(text) + 1)
        expected = any(text[:end].endswith(stop.encode()) for end in ends for stop in stops)
        assert finder.matches(tokens[:count]) == expected


def test_long_stops_cost_what_their_length_costs() -> None:
    """Tables for stops 100 times the longest that clients may send take less than 1 s."""
    letters = [chr(ord("a") + i).encode() for i in range(26)]
    pieces = [a + b + c + d for a in letters for b in letters for c in letters for d in letters[:8]]
    tables = StopStringTables([*pieces, *letters])
    before = time.thread_time()
    for stops in (("€" * 25_600,), tuple(c * 25_600 for c in "abcdefghijklmnop"), tuple("aeiou")):
        tables.of(stops)
    assert time.thread_time() - before < 1.0


def test_the_tables_used_last_are_kept() -> None:
    """Tables used last are kept within ``most``, or one larger one; evicted ones still work."""
    tables = StopStringTables([b"a", b"b"], most=10)
    first = tables.of(("a",))
    assert tables.of(("a",)) is first
    assert first.size == 3
    for stop in ("b", "ab", "a"):
        tables.of((stop,))
    assert tables.of(("a",)) is first
    for number in range(100):
        tables.of((f"{number}",))
        assert tables.size <= 10
    assert tables.of(("a",)) is not first
    assert first.matches([1, 0])
    assert tables.of(("a" * 50,)).matches([0] * 50)
    assert tables.size > 10
    assert tables.of(("a",)).matches([0])
    assert tables.size == 3
