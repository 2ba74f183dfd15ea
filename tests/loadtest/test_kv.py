"""`python -m loadtest.kv`: rows that can be checked by hand, its options, a small run."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from kvpolicy.token_allocation import Floors
from kvpolicy.value import UNFITTED
from loadtest import kv
from loadtest.kv import _parser, _plan, measure
from loadtest.kv_plan import QUICK, KvPlan, cases_of
from loadtest.kv_rows import COLUMNS, KvRun, row
from loadtest.kv_run import KvSearches
from loadtest.policy_events import event_us
from loadtest.token_eviction.token_eviction_run import floors_for
from runtime.embedded.eviction import ValueParams
from tests.loadtest.command import refused

KEYS = {
    "policy",
    "rho",
    "task",
    "search",
    "expansions",
    "completed",
    "n",
    "accuracy",
    "peak_kv_tokens",
    "peak_ratio_vs_full",
    "active_ratio_vs_full",
    "identical_trees",
    "rehydrations",
    "rehydration_share",
    "recomputed_tokens",
    "policy_us_p50",
    "policy_share",
    "seconds",
    "tree_digest",
}

WHOLE = KvRun(
    correct=True,
    completed=True,
    digest="aa",
    budget=16_384,
    peak=1_000,
    active=200,
    rehydrations=0,
    recomputed=0,
    decoded=900,
    again_seconds=0.0,
    policy_seconds=0.0,
    seconds=2.0,
)
"""A search at full retention that held 1,000 tokens, 200 of them active."""


def test_a_row_by_hand() -> None:
    """Two searches in a quarter of the KV: one unchanged, one ended early with another tree."""
    tight = replace(WHOLE, budget=250, peak=250, rehydrations=4, recomputed=80, again_seconds=0.1)
    tight = replace(tight, least_tokens=70)
    early = replace(WHOLE, correct=False, completed=False, digest="bb", budget=300, peak=300)
    pair = row([tight, early], [WHOLE, WHOLE])
    assert pair["n"] == 2
    assert (pair["completed"], pair["accuracy"], pair["identical_trees"]) == (0.5, 0.5, 0.5)
    assert pair["peak_kv_tokens"] == 300
    assert pair["peak_ratio_vs_full"] == pytest.approx(0.275)
    assert pair["active_ratio_vs_full"] == pytest.approx(0.2)
    assert pair["within"] == 0.5, "250 is at most 0.27 of 1,000, 300 is not"
    assert (pair["rehydrations"], pair["recomputed_tokens"]) == (2.0, 40.0)
    assert pair["least_tokens"] == 70.0, "of those that tell"
    assert pair["rehydration_share"] == pytest.approx(0.1 / 4.0)
    assert row([WHOLE], [WHOLE])["tree_digest"] != pair["tree_digest"]


def test_a_peak_may_be_the_active_set() -> None:
    """KV that is being read cannot be evicted: a peak of 0.3 is within where 0.3 is active."""
    busy = replace(WHOLE, active=300)
    assert row([replace(busy, peak=300)], [busy])["within"] == 1.0


def test_cases_are_configurations_of_what_goes_back() -> None:
    """Backtracking has two configurations, with one leaf a round or four; rebase has one case."""
    cases = cases_of(KvPlan(tasks=("blocksworld",)))
    shapes = [(c.search, c.config, c.spec.parallel, c.spec.expansions) for c in cases]
    assert shapes[:4] == [
        ("best_first", "S", 1, 64),
        ("best_first", "S", 4, 64),
        ("best_first", "L", 1, 256),
        ("best_first", "L", 4, 256),
    ]
    assert [c.search for c in cases[8:]] == ["rebase"]
    assert all(c.spec.max_depth >= 6 for c in cases)


@pytest.mark.parametrize("policy", ["full", "lru", "arborkv"])
def test_events_at_1000_blocks_are_timed(policy: str) -> None:
    """Every policy but full retention, which decides nothing, takes time for an event."""
    assert (event_us(policy) > 0) == (policy != "full")  # type: ignore[arg-type]


def test_events_are_timed_with_all_signals_read() -> None:
    """An event that reads all signals, attention included, is timed."""
    assert event_us("arborkv", worth=ValueParams(UNFITTED)) > 0


def test_groups_stand_for_policies() -> None:
    """A group expands to its policies, each once; floors follow from a task's longest step."""
    parser = _parser()
    assert _plan(parser, parser.parse_args(["--policy", "lru,paper,h2o"])).policies == [
        "lru",
        "extractive",
        "extractive_never",
        "tail_only",
        "streaming_llm",
        "h2o",
        "thinkv",
    ]
    assert floors_for("blocksworld") == Floors(0.05, 2, 2)
    assert floors_for("wordproblem") == Floors(0.05, 6, 6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "mru"], "--policy: mru: known are full, lru, arborkv, extractive, "),
        (["--rho", "0"], "--rho: 0: must be values above 0"),
        (["--limit", "0"], "--limit: 0: must be at least 1"),
        (["--keep", "/nowhere/kept"], "--keep: /nowhere/kept: there is no folder /nowhere"),
        (["--theta", "/nowhere"], "--theta: kv_theta: /nowhere: No such file or directory; a file"),
    ],
)
def test_a_wrong_switch_is_one_line(
    words: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The message names the option, its value and what is allowed; stdout is empty."""
    assert message in refused(kv.main, words, monkeypatch)
    assert capsys.readouterr().out == ""


@pytest.mark.slow
def test_a_small_run() -> None:
    """Rows have every key, budgets hold, and a completed search has the tree of full
    retention."""
    plan = replace(QUICK, tasks=("blocksworld",), searches=("best_first",), rhos=(0.25,))
    plan = replace(plan, policies=("lru", "arborkv"), questions=1, expansions=16, threads=1)
    rows = asyncio.run(measure(plan))
    assert [(r["policy"], r["rho"]) for r in rows] == [
        ("full", 1.0),
        ("lru", 0.25),
        ("arborkv", 0.25),
    ]
    for cell_row in rows:
        assert cell_row.keys() >= KEYS | set(COLUMNS)
        active = cell_row["active_ratio_vs_full"] * rows[0]["peak_kv_tokens"]
        assert 0 < cell_row["peak_kv_tokens"] <= max(cell_row["budget_tokens"], round(active))
        assert cell_row["completed"] in (0.0, 1.0)
        if cell_row["completed"]:
            assert cell_row["identical_trees"] == 1.0
            assert cell_row["tree_digest"] == rows[0]["tree_digest"]
    assert rows[-1]["completed"] == 1.0
    assert rows[0]["least_tokens"] == 0.0
    assert 0 < rows[-1]["least_tokens"] <= rows[-1]["recomputed_tokens"]
    assert rows[-1]["within"] == 1.0


@pytest.mark.nightly
@pytest.mark.slow
def test_a_budget_for_all_that_is_read_at_once() -> None:
    """Four leaves a round read more than an eighth of the KV: a budget for them evicts less."""
    plan = replace(QUICK, tasks=("blocksworld",), searches=("best_first",), rhos=(0.125,))
    plan = replace(plan, policies=("arborkv",), parallel=(4,), questions=1, threads=1)
    cells = {}
    for active in (False, True):
        variant = replace(plan, expansions=16, active=active)
        full, cells[active] = asyncio.run(measure(variant))
        assert cells[active]["tree_digest"] == full["tree_digest"]
        assert cells[active]["within"] == 1.0
    active_tokens = full["active_ratio_vs_full"] * full["peak_kv_tokens"]
    assert cells[True]["budget_tokens"] == pytest.approx(active_tokens)
    assert cells[False]["budget_tokens"] < cells[True]["budget_tokens"]
    assert cells[False]["recomputed_tokens"] > cells[True]["recomputed_tokens"]


@pytest.mark.nightly
@pytest.mark.slow
def test_kept_searches_are_not_run_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same rows, times included, come from the file alone; a new budget is run."""
    plan = replace(QUICK, tasks=("blocksworld",), searches=("best_first",), rhos=(0.25,))
    plan = replace(plan, policies=("arborkv",), questions=1, expansions=4, threads=1, split="dev")
    plan = replace(plan, kept_in=tmp_path / "kept.jsonl")
    runs = 0
    exact = KvSearches._exact

    async def count_run(*args: Any) -> Any:
        nonlocal runs
        runs += 1
        return await exact(*args)

    monkeypatch.setattr(KvSearches, "_exact", count_run)

    def measured(plan: KvPlan) -> Any:
        rows = asyncio.run(measure(plan))
        return [{k: v for k, v in row.items() if k != "policy_us_p50"} for row in rows]

    first = measured(plan)
    assert runs == 2
    assert measured(plan) == first
    assert runs == 2
    more = measured(replace(plan, rhos=(0.25, 0.5)))
    assert runs == 3
    assert more[:2] == first


@pytest.mark.nightly
@pytest.mark.slow
def test_a_small_run_with_token_eviction() -> None:
    """Rows have every key and budgets hold. With rehydration the tree is the exact engine's at
    full retention; the other policies recompute nothing."""
    plan = replace(QUICK, tasks=("blocksworld",), searches=("best_first",), rhos=(0.25,))
    policies = ("extractive", "extractive_never", "h2o")
    plan = replace(plan, policies=policies, questions=1, expansions=24, threads=1)
    rows = asyncio.run(measure(plan))
    assert [r["policy"] for r in rows] == ["full", *policies]
    for cell_row in rows:
        assert cell_row.keys() >= KEYS | set(COLUMNS)
        assert 0 < cell_row["peak_kv_tokens"] <= cell_row["budget_tokens"]
        assert cell_row["completed"] == 1.0
    assert rows[1]["tree_digest"] == rows[0]["tree_digest"]
    assert rows[1]["recomputed_tokens"] > 0
    assert rows[2]["recomputed_tokens"] == rows[3]["recomputed_tokens"] == 0
    assert rows[3]["tree_digest"] != rows[0]["tree_digest"]
