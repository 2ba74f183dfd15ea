"""What a benchmark prints."""

from __future__ import annotations

import json

import pytest

from loadtest.report import publish

ROWS = [{"policy": "ets", "wall": 1.25, "again": None}, {"policy": "dora", "wall": None}]


def test_a_table_leaves_out_what_no_row_has(capsys: pytest.CaptureFixture[str]) -> None:
    """A value that one row lacks is a dash."""
    rows = [dict.fromkeys(("policy", "wall", "again")) | row for row in ROWS]
    publish({"rows": rows}, False, "Title", ("policy", "wall", "again"))
    text = capsys.readouterr().out
    assert all(word in text for word in ("Title", "ets", "1.25", " - "))
    assert "again" not in text


def test_json_has_all(capsys: pytest.CaptureFixture[str]) -> None:
    """The document as it is, alone."""
    publish({"rows": ROWS}, True)
    assert json.loads(capsys.readouterr().out) == {"rows": ROWS}
