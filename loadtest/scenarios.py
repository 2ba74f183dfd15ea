"""How does a server cope with the loads that people put on it?

`python -m loadtest.scenarios [--scenario steady,burst] [--quick] [--json] [--plots FOLDER]`. The
bundled models run behind a server in a process of its own, a new one for each scenario of
`loadtest/locust_scenarios.py`: steady, burst, mixed (widths), tails (long searches), abusive (one
key sends without pause beside an honest one). A row has requests a second, goodput (answers a
second that arrived within ``DEADLINE`` seconds), quantiles of the honest key's latency, the most KV
held, and how many requests were refused, answered too late, or failed. ``--plots`` writes a report,
``README.md``: the table, and a picture of each scenario.
"""

from __future__ import annotations

import os
import platform
import shlex
import sys
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import Any

import httpx
from matplotlib.figure import Figure

from loadtest.options import BenchmarkParser, listed
from loadtest.report import cell_text, publish, say_row
from loadtest.served import Served, load_records, load_row, values

SCENARIOS = {
    "steady": ["Steady"],
    "burst": ["Burst"],
    "mixed": ["MixedWidths"],
    "tails": ["LongTails"],
    "abusive": ["Abused", "Abuser"],
}
DEADLINE = 30.0
KEYS = {"api_keys": "honest:honest,abusive:abusive", "key_running": 8, "key_queued": 16}
COLUMNS = {
    "scenario": "scenario",
    "offered_rps": "requests a second",
    "goodput_rps": "answers in time a second",
    "p50_ms": "p50, ms",
    "p95_ms": "p95, ms",
    "p99_ms": "p99, ms",
    "kv_peak_tokens": "KV peak, tokens",
    "refused": "refused",
    "late": "late",
    "lost": "failed",
}
"""Headings of the report's table, by their names in a row."""


def run(scenario: str, users: int, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run a scenario; its row, and the records of its requests."""
    with Served(deadline_seconds=DEADLINE, **KEYS) as served:
        records = load_records(served.url, SCENARIOS[scenario], seconds, users=users)
        peak = _kv_peak(served.url)
    return {"scenario": scenario} | load_row(records, DEADLINE) | {"kv_peak_tokens": peak}, records


def plot(scenario: str, records: list[dict[str, Any]], folder: Path) -> None:
    """Draw when each request ended and how long it took, the unanswered ones at the bottom."""
    figure = Figure(figsize=(7, 4))
    axes = figure.add_subplot()
    axes.set_rasterization_zorder(2)  # thousands of points: pixels, not shapes
    for key in sorted({request["key"] for request in records}):
        answered = [r for r in records if r["key"] == key and r["status"] == 200]
        ends = [r["ended"] for r in answered]
        axes.scatter(ends, [r["ms"] / 1000 for r in answered], s=8, label=key, zorder=1)
    others = [request["ended"] for request in records if request["status"] != 200]
    axes.scatter(others, [0.0] * len(others), s=12, marker="x", label="not answered", zorder=1)
    axes.set(title=scenario, xlabel="seconds", ylabel="seconds to the answer")
    axes.legend()
    figure.savefig(folder / f"{scenario}.svg")


def report(
    rows: Sequence[dict[str, Any]], users: int, seconds: float, day: date, args: Sequence[str]
) -> str:
    """The report in Markdown, of a run with these ``args``; its pictures are in the same folder."""
    command = shlex.join(["python", "-m", "loadtest.scenarios", *args])
    lines = [
        "# The server under load",
        "",
        f"`{command}` wrote this on {day}: the bundled models on {os.cpu_count()} cores"
        f" ({platform.machine()}), {users} users, {seconds:g} s a scenario. An answer is in time"
        f" within {DEADLINE:g} s; quantiles are those of the honest key's latency."
        " `loadtest/locust_scenarios.py` defines the scenarios.",
        "",
        "| " + " | ".join(COLUMNS.values()) + " |",
        "|---" * len(COLUMNS) + "|",
        *("| " + " | ".join(cell_text(row[name]) for name in COLUMNS) + " |" for row in rows),
        "",
        *(f"![{row['scenario']}: when each request ended]({row['scenario']}.svg)" for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _kv_peak(url: str) -> int:
    text = httpx.get(f"{url}/metrics", timeout=60).raise_for_status().text
    return round(max(values(text, "hedgerow_kv_peak_tokens", model="policy")))


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser("scenarios", __doc__, quick="10 s each with few users")
    parser.add_argument(
        "--scenario", type=listed(str, SCENARIOS), default=list(SCENARIOS), help="by commas"
    )
    parser.add_argument("--plots", type=Path, help="write the report and its SVGs to this folder")
    options = parser.parse_args()
    users, seconds = (8, 10.0) if options.quick else (32, 120.0)
    if options.plots is not None:
        options.plots.mkdir(parents=True, exist_ok=True)
    rows = []
    for scenario in options.scenario:
        row, records = run(scenario, users, seconds)
        say_row(row, tuple(row))
        if options.plots is not None:
            plot(scenario, records, options.plots)
        rows.append(row)
    publish({"rows": rows}, options.json, "under load", tuple(COLUMNS))
    if options.plots is not None:
        text = report(rows, users, seconds, date.today(), sys.argv[1:])
        (options.plots / "README.md").write_text(text)


if __name__ == "__main__":
    main()
