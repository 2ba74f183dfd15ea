"""`python -m loadtest.sglang`: what is counted, and what a search is compared with."""

from __future__ import annotations

import httpx

from loadtest.sglang import KEYS, Sent, notes, raw_list
from search.events import Selected
from tests.search.trees import END, STEP, drawn


def test_rows_have_every_key() -> None:
    """Notes are read without any server: linear in the width."""
    narrow, wide = notes(64), notes(256)
    assert tuple(narrow) == KEYS
    assert 3.5 < wide["note_bytes"] / narrow["note_bytes"] < 4.5
    assert wide["wall_vs_raw"] is None


async def test_requests_are_counted_by_round_and_server() -> None:
    """A look at a server's health is none of them; a round begins with what it selects."""
    sent = Sent()
    for path in ("/generate", "/generate", "/health"):
        await sent.look(httpx.Request("POST", f"http://policy{path}"))
    await sent.look(httpx.Request("POST", "http://reward/classify"))
    sent.listen(Selected(1, 0, 8))
    sent.listen(Selected(1, 1, 8))
    await sent.look(httpx.Request("POST", "http://policy/generate"))
    sent.listen(Selected(2, 2, 8))
    assert (sent.total, sent.most) == (4, 2)


def test_the_raw_list_draws_what_the_chains_drew() -> None:
    """As many tokens for each chain, whatever they say, each by a seed of its own."""
    lines = [(0, "ab", STEP, None), (0, "c", END, None), (1, "def", END, None)]
    body = raw_list(drawn(*lines))
    assert body["input_ids"] == [[ord("?")]] * 2
    asked = [(one["max_new_tokens"], one["sampling_seed"]) for one in body["sampling_params"]]
    assert asked == [(1, 0), (5, 1)]
    assert all(one["ignore_eos"] for one in body["sampling_params"])
