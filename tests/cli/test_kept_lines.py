"""Lines that outlive the run that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from cli.kept_lines import KeptLines

NUMBER = TypeAdapter(int)


@pytest.mark.parametrize("cut", range(1, 45))
def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path, cut: int) -> None:
    """Wherever a run was killed: what was whole is there, and what is added later is whole."""
    path = tmp_path / "kept.jsonl"
    for of, made in (("one", 1), ("two", 2)):
        KeptLines(path, "us", NUMBER).put(of, made)
    path.write_text(path.read_text()[:-cut])
    kept = KeptLines(path, "us", NUMBER)
    two = 2 if cut == 1 else None  # its end alone is missing
    assert (kept.get("one"), kept.get("two")) == (1, two)
    kept.put("three", 3)
    kept.put("four", 4)
    again = KeptLines(path, "us", NUMBER)
    assert [again.get(of) for of in ("one", "two", "three", "four")] == [1, two, 3, 4]


def test_a_file_of_something_else_is_not_added_to(tmp_path: Path) -> None:
    """Such as the questions themselves."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"problem": "1 + 1?", "answer": 2}\n')
    with pytest.raises(ValueError, match=r"questions.jsonl, line 1: no result that was kept"):
        KeptLines(path, "us", NUMBER)
