"""Where the steps of a chain end, and which step's seed the next token has."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hedgerow_sglang.plugin_protocol import NoteError
from hedgerow_sglang.step_chain import (
    CHAIN,
    ENDED,
    ENDS,
    StepChain,
    StepEnds,
    parse_chain,
    parse_ends,
)
from runtime.stop_strings import StopStringTables

PIECES = (b"a", b"\n", b"\n\n", b"b\n", b"\nc", b"a\n\nb", b"ab", b"aab", b"")
BLANK_LINE = StepEnds.of(PIECES, [b"\n\n"])


def chain(*seeds: int, most: int = 8) -> StepChain:
    """A chain of steps with these seeds; a step ends with a blank line or after ``most`` tokens."""
    return StepChain(seeds, most, BLANK_LINE.name)


def test_by_hand() -> None:
    """A blank line may be one token, span two tokens, or lie inside one."""
    assert BLANK_LINE.moves[0] == {1: 1, 2: ENDED, 3: 1, 5: ENDED}
    assert BLANK_LINE.moves[1] == {1: ENDED, 2: ENDED, 3: 1, 4: ENDED, 5: ENDED, 8: 1}
    step_chain = chain(10, 20, 30)
    assert step_chain.follow([], BLANK_LINE) == 10
    assert step_chain.follow([0, 1], BLANK_LINE) == 10
    assert step_chain.follow([0, 1, 1], BLANK_LINE) == 20
    assert step_chain.follow([0, 1, 1, 0, 5], BLANK_LINE) == 30
    assert not step_chain.over
    step_chain.follow([0, 1, 1, 0, 5, 2], BLANK_LINE)
    assert step_chain.over


def test_a_step_is_as_long_as_it_may_be() -> None:
    """At ``most`` tokens the next step begins; a stop string across that border does not count."""
    step_chain = chain(10, 20, 30, most=2)
    assert step_chain.follow([0, 1], BLANK_LINE) == 20
    assert step_chain.follow([0, 1, 1], BLANK_LINE) == 20


def test_a_step_that_says_what_the_last_one_said_is_the_last() -> None:
    """The search treats a repeated step as a loop; equal pieces cut by length are not a loop."""
    step_chain = chain(*range(9))
    step_chain.follow([0, 2, 0, 2], BLANK_LINE)
    assert step_chain.over
    pieces = chain(*range(9), most=2)
    pieces.follow([0, 0, 0, 0], BLANK_LINE)
    assert not pieces.over


@pytest.mark.promise(
    "A chain in one SGLang request ends each step where the embedded engine would end it."
)
@given(
    st.lists(st.integers(0, len(PIECES) - 1), max_size=20),
    st.lists(st.sampled_from(["\n\n", "ab", "aab", "\nc", "b\n\na"]), min_size=1, max_size=3),
    st.integers(1, 9),
)
def test_steps_end_where_the_engine_cuts_them(
    tokens: list[int], stops: list[str], most: int
) -> None:
    """Steps end by the rule of ``runtime.stop_strings``, applied to the step's own bytes."""
    table = StopStringTables(PIECES).of(tuple(stops))
    ends = StepEnds.of(PIECES, [stop.encode() for stop in stops])
    step_chain, step, step_tokens = StepChain(tuple(range(40)), most, ends.name), 0, []
    for place, token in enumerate(tokens):
        step_tokens.append(token)
        if table.matches(step_tokens) or len(step_tokens) == most:
            step, step_tokens = step + 1, []
        assert step_chain.follow(tokens[: place + 1], ends) == step


def test_what_is_sent_is_read() -> None:
    """Both parsers read back what the params' writers wrote."""
    assert parse_ends(BLANK_LINE.param()[ENDS]) == (BLANK_LINE.name, BLANK_LINE)
    assert parse_chain(chain(-5, 1 << 62).param()[CHAIN]) == chain(-5, 1 << 62)


@pytest.mark.parametrize(
    ("parse", "text", "message"),
    [
        (parse_chain, 3, "a string of JSON"),
        (parse_chain, "[", "a string of JSON"),
        (parse_chain, '{"seeds": [1.5]}', "seeds: a list of signed"),
        (parse_chain, '{"seeds": [1], "most": 0}', "most: 0"),
        (parse_chain, '{"seeds": [1], "most": 1}', "ends: None"),
        (parse_ends, '{"moves": []}', "moves: a list of objects"),
        (parse_ends, '{"moves": [{"a": 0}]}', "tokens are whole numbers"),
        (parse_ends, '{"moves": [{"1": 1}]}', "from 0 to 0, or to -1"),
        (parse_ends, '{"moves": [{"1": 0}]}', "ends: None"),
    ],
)
def test_what_is_wrong_is_refused(parse, text: object, message: str) -> None:
    """A wrong parameter raises NoteError naming the field, before the request is queued."""
    with pytest.raises(NoteError, match=message):
        parse(text)
