"""`python -m loadtest.sglang_flips`: what counts as a flip."""

from __future__ import annotations

from loadtest.sglang_flips import Prefix, compare, forked


def test_streams_are_compared_up_to_their_first_difference() -> None:
    """Three equal tokens; two equal and one different, after which no token counts; and a stream
    that ends earlier than its pair."""
    ours = [(1, 2, 3), (1, 2, 9, 9, 9), (5, 6)]
    theirs = [(1, 2, 3), (1, 2, 3, 4, 5), (5, 6, 7)]
    assert compare(ours, theirs) == {
        "steps": 3,
        "equal_steps": 0.3333,
        "tokens": 3 + 3 + 2,
        "flips": 2,
        "flips_per_1000_tokens": 250.0,
    }


def test_the_first_child_of_each_prefix_is_forked() -> None:
    """Two prefixes with two children each: the forks have seeds of their own."""
    prefixes = [Prefix((1,), (10, 11)), Prefix((2,), (12, 13))]
    first, second = forked(prefixes, [(5, 5), (6,), (7,), (8,)])
    assert (first.tokens, second.tokens) == ((1, 5, 5), (2, 7))
    assert len({*first.seeds, *second.seeds, 10, 11, 12, 13}) == 8
