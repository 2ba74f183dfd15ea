"""`python -m loadtest.sglang`: rows of notes, and the raw request that searches compare with."""

from __future__ import annotations

from loadtest.sglang import KEYS, notes, raw_list
from tests.search.trees import END, STEP, tree_of


def test_rows_have_every_key() -> None:
    """Without a server a row has every key, and notes are linear in the width."""
    narrow, wide = notes(64), notes(256)
    assert tuple(narrow) == KEYS
    assert 3.5 < wide["note_bytes"] / narrow["note_bytes"] < 4.5
    assert wide["wall_vs_raw"] is None


def test_the_raw_list_draws_what_the_chains_drew() -> None:
    """It draws as many tokens for each chain, past any end, each with its own seed."""
    lines = [(0, "ab", STEP, None), (0, "c", END, None), (1, "def", END, None)]
    body = raw_list(tree_of(*lines))
    assert body["input_ids"] == [[ord("?")]] * 2
    draws = [
        (params["max_new_tokens"], params["sampling_seed"]) for params in body["sampling_params"]
    ]
    assert draws == [(1, 0), (5, 1)]
    assert all(params["ignore_eos"] for params in body["sampling_params"])
