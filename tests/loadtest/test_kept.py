"""A comparison that resumes where an earlier one ended."""

from __future__ import annotations

from pathlib import Path

from pydantic import TypeAdapter

import kvpolicy
import search
from cli.kept_lines import KeptLines
from loadtest.compare import Results, compare
from loadtest.kept import code_of, kept_results, of_search
from loadtest.searches import Method, items_of
from search.spec import SearchSpec
from tests.search.scripted_engine import ScriptedEngine

REBASE = Method("rebase", SearchSpec(policy="rebase", width=8))
BEAM = Method("beam", SearchSpec(policy="beam", width=8))


async def run(path: Path, methods: list[Method], count: int, rounds: int = 0) -> list[Results]:
    """Search ``count`` questions by the methods, storing results in the file ``path``."""
    items = items_of("game24", "dev", count, seed=0)
    return await compare(ScriptedEngine(), items, methods, keep_rounds=rounds, kept_in=path)


async def test_known_results_are_taken_and_others_added(tmp_path: Path) -> None:
    """After two questions a run with a third one and another method searches only the new ones."""
    path = tmp_path / "kept.jsonl"
    first = await run(path, [REBASE], 2)
    before = path.read_text()
    rebase, beam = await run(path, [REBASE, BEAM], 3)
    after = path.read_text()
    assert after.startswith(before)
    assert [len(text.splitlines()) for text in (before, after)] == [2, 6]
    assert rebase.results[:2] == first[0].results
    assert len({result.digest for result in beam.results}) == 3
    assert await run(path, [REBASE, BEAM], 3) == [rebase, beam]
    assert path.read_text() == after


async def test_decisions_that_are_wanted_are_searched_again(tmp_path: Path) -> None:
    """A stored result without rounds is used only where rounds are not needed."""
    path = tmp_path / "kept.jsonl"
    await run(path, [REBASE], 1)
    (with_rounds,) = await run(path, [REBASE], 1, rounds=1)
    assert with_rounds.results[0].rounds
    assert await run(path, [REBASE], 1, rounds=1) == [with_rounds]
    assert await run(path, [REBASE], 1) == [with_rounds]


async def test_other_engines_specs_and_half_lines_do_not_count(tmp_path: Path) -> None:
    """Only results of this engine and this spec are used."""
    path = tmp_path / "kept.jsonl"
    (results,) = await run(path, [REBASE], 2)
    first, second = items_of("game24", "dev", 2, 0)
    mark = ScriptedEngine().capabilities.fingerprint
    assert kept_results(path, mark).get(of_search(first, REBASE)) == results.results[0]
    assert kept_results(path, "another").get(of_search(first, REBASE)) is None
    wider = Method("rebase", SearchSpec(policy="rebase", width=9))
    assert kept_results(path, mark).get(of_search(first, wider)) is None
    path.write_text(path.read_text()[:-40])
    assert kept_results(path, mark).get(of_search(second, REBASE)) is None


def test_lines_are_taken_back_from_the_same_makers_alone(tmp_path: Path) -> None:
    """A stored value is read by the next run; another maker's line is ignored and kept."""
    path, number = tmp_path / "kept.jsonl", TypeAdapter(int)
    KeptLines(path, "us", number).put("seven", 7)
    KeptLines(path, "them", number).put("seven", 8)
    assert KeptLines(path, "us", number).get("seven") == 7
    assert KeptLines(path, "us", number).get("eight") is None
    assert KeptLines(None, "us", number).get("seven") is None


def test_code_is_named_by_all_of_its_packages() -> None:
    """Different packages give different names, the same packages the same name."""
    assert code_of(search) == code_of(search)
    assert len({code_of(search), code_of(kvpolicy), code_of(search, kvpolicy)}) == 3
