"""The protocol between a client and our plug-in, without SGLang."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hedgerow_sglang.plugin_protocol import (
    NAME,
    Note,
    NoteError,
    custom_params,
    parse_note,
    plugin_counts,
    sampling_seed,
)

ids = st.integers(0, 2**20 - 1)
names = st.text(min_size=1)


@st.composite
def notes(draw: st.DrawFn) -> Note:
    """Draw any valid note."""
    parent = draw(st.integers(0, 2**20 - 2))
    step = draw(st.booleans())
    return Note(
        tree=draw(names),
        prompt=draw(st.integers(1, 2**31 - 1)),
        node=draw(st.integers(parent + 1, 2**20 - 1)) if step else None,
        parent=parent if step else None,
        turn=draw(st.integers(0, 2**31 - 1)),
        values=draw(st.dictionaries(ids, st.floats(0, 1))),
        active=tuple(draw(st.lists(ids))),
        dead=tuple(draw(st.lists(ids))),
        outlook=tuple(draw(st.lists(ids))),
        over=tuple(draw(st.lists(names))),
    )


@given(notes())
def test_what_is_said_is_what_is_heard(note: Note) -> None:
    assert parse_note(custom_params(note)[NAME]) == note


def test_a_note_as_it_travels() -> None:
    """A note is sent as in the module's docstring: one JSON string without empty fields."""
    note = Note(
        "key/t1", 57, node=12, parent=3, turn=5, values={3: 0.8125}, active=(3, 4), outlook=(4, 2)
    )
    assert custom_params(note) == {
        "hedgerow": '{"tree":"key/t1","prompt":57,"node":12,"parent":3,"turn":5,'
        '"values":{"3":0.8125},"active":[3,4],"outlook":[4,2]}'
    }
    assert custom_params(Note("t", 9, over=("t",))) == {
        "hedgerow": '{"tree":"t","prompt":9,"over":["t"]}'
    }


@pytest.mark.promise(
    "The SGLang plug-in refuses a wrong note with an error that names what is wrong in it."
)
@pytest.mark.parametrize(
    ("raw_note", "message"),
    [
        (3, "hedgerow: int"),
        ("{", "hedgerow: not JSON"),
        ("[" * 100_000, "hedgerow: not JSON"),
        ('{"tree":"t","prompt":' + "9" * 5000 + "}", "hedgerow: not JSON"),
        ("[]", "hedgerow: list"),
        ('{"prompt":1}', "tree: None"),
        ('{"tree":"","prompt":1}', "tree: ''"),
        ('{"tree":"t"}', "prompt: None"),
        ('{"tree":"t","prompt":0}', "prompt: 0"),
        ('{"tree":"t","prompt":true}', "prompt: True"),
        ('{"tree":"t","prompt":1,"nodes":1}', "nodes: unknown"),
        ('{"tree":"t","prompt":1,"node":1}', "node: alone"),
        ('{"tree":"t","prompt":1,"node":3,"parent":3}', "node: 3"),
        ('{"tree":"t","prompt":1,"node":1048576,"parent":3}', "node: 1048576"),
        ('{"tree":"t","prompt":1,"turn":-1}', "turn: -1"),
        ('{"tree":"t","prompt":1,"values":[1]}', "values: [1]"),
        ('{"tree":"t","prompt":1,"values":{"3":1.5}}', "values: 1.5 of node 3"),
        ('{"tree":"t","prompt":1,"values":{"3":NaN}}', "values: nan of node 3"),
        ('{"tree":"t","prompt":1,"values":{"x":1}}', "values: 'x'"),
        ('{"tree":"t","prompt":1,"values":{"9999999999":1}}', "values: '9999999999'"),
        ('{"tree":"t","prompt":1,"active":3}', "active: 3"),
        ('{"tree":"t","prompt":1,"dead":[-1]}', "dead: -1"),
        ('{"tree":"t","prompt":1,"outlook":["2"]}', "outlook: '2'"),
        ('{"tree":"t","prompt":1,"over":[1]}', "over: 1"),
    ],
)
def test_a_wrong_note_is_refused_by_name(raw_note: object, message: str) -> None:
    with pytest.raises(NoteError) as refused:
        parse_note(raw_note)
    assert str(refused.value).startswith(message)


@given(st.text() | st.dictionaries(st.text(), st.none() | st.text()).map(json.dumps))
def test_whatever_comes_is_a_note_or_refused(raw_note: str) -> None:
    """Any string parses or raises NoteError: SGLang's scheduler must see no other exception."""
    try:
        parse_note(raw_note)
    except NoteError:
        return


@given(st.integers(0, 2**64 - 1))
def test_a_seed_keeps_its_bits(seed: int) -> None:
    signed = sampling_seed(seed)
    assert -(2**63) <= signed < 2**63
    assert signed % 2**64 == seed


def test_figures_add_up_over_the_schedulers() -> None:
    """Figures of two schedulers behind one port are summed; a flag holds if it holds for both."""
    figures = {"evicts": 1, "seeds": 1, "held_tokens": 5, "evicted_tokens": 7}
    both = plugin_counts({"internal_states": [{NAME: figures}, {NAME: figures | {"evicts": 0}}]})
    assert both is not None
    assert (both["held_tokens"], both["evicted_tokens"], both["searches"]) == (10, 14, 0)
    assert (both["evicts"], both["seeds"]) == (0, 1)


def test_a_stock_server_has_no_figures() -> None:
    assert plugin_counts({"internal_states": [{"max_running_requests": 8}]}) is None
    assert plugin_counts({}) is None


def test_the_wire_needs_neither_sglang_nor_torch() -> None:
    """Clients import the protocol in environments without either package."""
    program = (
        "import sys, hedgerow_sglang.plugin_protocol; print(*sorted(m for m in sys.modules if m in "
        "('sglang', 'torch', 'numpy', 'transformers')))"
    )
    counts = subprocess.check_output([sys.executable, "-c", program], text=True)
    assert counts.strip() == ""
