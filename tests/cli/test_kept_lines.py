"""Lines that outlive the run that wrote them."""

from __future__ import annotations

from pathlib import Path

import pytest
from pydantic import TypeAdapter

from cli.kept_lines import KeptLines

NUMBER = TypeAdapter(int)


@pytest.mark.parametrize("cut", range(1, 45))
def test_a_line_that_was_cut_off_spoils_no_other(tmp_path: Path, cut: int) -> None:
    """Wherever a run was killed, whole lines are read, and lines added later are whole."""
    path = tmp_path / "kept.jsonl"
    for key, number in (("one", 1), ("two", 2)):
        KeptLines(path, "us", NUMBER).put(key, number)
    path.write_text(path.read_text()[:-cut])
    lines = KeptLines(path, "us", NUMBER)
    two = 2 if cut == 1 else None  # only its line end is missing
    assert (lines.get("one"), lines.get("two")) == (1, two)
    lines.put("three", 3)
    lines.put("four", 4)
    reopened = KeptLines(path, "us", NUMBER)
    assert [reopened.get(key) for key in ("one", "two", "three", "four")] == [1, two, 3, 4]


def test_a_file_of_something_else_is_not_added_to(tmp_path: Path) -> None:
    """A file of questions, for example, is refused."""
    path = tmp_path / "questions.jsonl"
    path.write_text('{"problem": "1 + 1?", "answer": 2}\n')
    with pytest.raises(ValueError, match=r"questions.jsonl, line 1: no result that was kept"):
        KeptLines(path, "us", NUMBER)
