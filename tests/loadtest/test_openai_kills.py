"""`python -m loadtest.openai_kills`: what is wrong, what is kept, and a wire that refuses."""

from __future__ import annotations

import random
from pathlib import Path

import httpx

from loadtest.hostile.completions_stub import CompletionsStub
from loadtest.hostile.sglang_stub import MortalStub
from loadtest.hostile.toxics import TOO_MANY, Proxy, listening
from loadtest.openai_kills import CALM, FAULTY, Ended, Searches, compared, held
from loadtest.searches import unlike_items
from models.bundled import SPRIG_FOLDER
from runtime.text import Text


def test_a_row_by_hand() -> None:
    """One the same, one with a digest of its own alone, one with other steps, one with an error."""
    known = {n: Ended("", "a", "1") for n in range(4)}
    found = known | {1: Ended("", "a", "2"), 2: Ended("", "b", "3"), 3: Ended("gone")}
    row = compared(found, known)
    assert row == {"answered": 3, "errors": ["gone"], "wrong": 1, "other_digests": 2}
    whole = {"searches": 4, "answered": 4, "wrong": 0, "left": 0}
    assert held(whole)
    for name, value in (("answered", 3), ("wrong", 1), ("left", 1)):
        assert not held(whole | {name: value})


def test_what_has_ended_is_kept(tmp_path: Path) -> None:
    """By phase and number, kills beside it; another run goes on from there."""
    first = Searches(tmp_path / "kept.jsonl", unlike_items("game24", 3))
    first._kept.put(first._name(CALM, 1), Ended("", "a", "1", 2.0))
    first.note_kill()
    first.note_kill()
    again = Searches(tmp_path / "kept.jsonl", unlike_items("game24", 5))
    assert again.ended(CALM) == {1: Ended("", "a", "1", 2.0)}
    assert again.ended(FAULTY) == {}
    assert again.kills == 2


async def test_an_answer_becomes_a_refusal() -> None:
    """429 with its ``Retry-After``, then the connection's end; asked again there is an answer."""
    stub = MortalStub(CompletionsStub.of(Text(SPRIG_FOLDER / "policy")))
    await stub.start()
    wire = Proxy(stub.port, share=1.0, names=[TOO_MANY], dice=random.Random(0))
    try:
        async with listening(wire.connection) as port, httpx.AsyncClient() as http:
            url = f"http://127.0.0.1:{port}/v1/models"
            refused = await http.get(url)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            wire.share = 0.0
            assert (await http.get(url)).is_success
        assert wire.done == {TOO_MANY: 1}
    finally:
        await stub.kill()
