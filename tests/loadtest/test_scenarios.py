"""Scenarios and the soak: rows from requests, and a short run of each."""

from __future__ import annotations

import asyncio
import re
from datetime import date
from importlib.util import find_spec
from pathlib import Path

import pytest

from loadtest.scenarios import DEADLINE, SCENARIOS, plot, report, run
from loadtest.served import load_row
from loadtest.soak import soak


def test_a_row_worked_by_hand() -> None:
    """Seven requests in 4 s: three honest replies, one of them late, and an abusive one; a
    refusal, a lost request, a deadline."""
    requests = [
        {"ended": end, "key": key, "ms": ms, "status": status}
        for end, key, ms, status in (
            (1.0, "honest", 100.0, 200),
            (2.0, "honest", 300.0, 200),
            (2.0, "abusive", 9000.0, 200),
            (3.0, "abusive", 1.0, 429),
            (3.0, "honest", 1.0, 0),
            (3.0, "honest", 30_000.0, 504),
            (4.0, "honest", 30_001.0, 200),
        )
    ]
    assert load_row(requests, DEADLINE) == {
        "requests": 7,
        "offered_rps": 1.75,
        "goodput_rps": 0.75,
        "p50_ms": 300,
        "p95_ms": 30001,
        "p99_ms": 30001,
        "refused": 1,
        "late": 2,
        "lost": 1,
    }
    assert load_row([], DEADLINE)["goodput_rps"] == 0.0


def test_the_report_has_a_line_and_a_picture_for_each(tmp_path: Path) -> None:
    """The report has a line for each row and names each picture's file."""
    requests = [{"ended": 2.0, "key": "honest", "ms": 12_345.6, "status": 200}]
    row = load_row(requests, DEADLINE) | {"kv_peak_tokens": 77}
    rows = [row | {"scenario": name} for name in SCENARIOS]
    for name in SCENARIOS:
        plot(name, requests, tmp_path)
    lines = report(rows, 8, 10.0, date(2026, 1, 2), ["--plots", "my load"]).splitlines()
    assert "on 2026-01-02" in lines[2]
    assert "loadtest.scenarios --plots 'my load'`" in lines[2]
    assert "| steady | 0.5 | 0.5 | 12,346 | 12,346 | 12,346 | 77 | 0 | 0 | 0 |" in lines
    pictures = re.findall(r"\((\w+\.svg)\)", "".join(lines))
    assert sorted(pictures) == sorted(path.name for path in tmp_path.iterdir())


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_scenario_runs() -> None:
    """One key sends requests without pause; no request is lost."""
    # Not imported: it would patch this process's threads.
    assert find_spec("locust") is not None, "install the extra `load`"
    row, requests = run("abusive", 4, 5.0)
    assert row["requests"] == len(requests) > 1
    assert row["lost"] == 0
    assert row["kv_peak_tokens"] > 0
    assert {request["key"] for request in requests} <= {"honest", "abusive"}
    assert set(SCENARIOS) >= {"steady", "burst", "mixed", "tails", "abusive"}


@pytest.mark.promise(
    "A server that runs for minutes at 80 % of its capacity grows by less than 2 % and holds "
    "nothing afterwards."
)
@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_a_minute_of_load_leaves_nothing_behind() -> None:
    """At 80 % of capacity, with clients that leave: no request lost, nothing held, no growth."""
    row = asyncio.run(soak(1.0, 0.8))
    if row["memory_growth"] >= 0.02:  # beside other tests caches fill late; a leak goes on
        row = asyncio.run(soak(3.0, 0.8))
    assert row["lost"] == 0
    assert row["held"] == {}
    assert row["memory_growth"] < 0.02
    assert row["left"] > 0
    assert row["late"] == 0
    assert row["requests"] > row["refused"]
