"""Rows and the choice of a budget weight, from numbers that can be checked by hand."""

from __future__ import annotations

from pathlib import Path

import pytest

from loadtest import budget_weight
from loadtest.budget_weight import chosen, largest_harmless, record, spec_for
from loadtest.compare import Results, compare
from loadtest.decisions import Decisions
from loadtest.policies import KeepOne
from loadtest.policy_rows import COLUMNS, PolicyCell
from loadtest.searches import Method, items_of
from loadtest.throughput import LIVE, REPLAY, Timing
from loadtest.turns import Times
from search.spec import SearchSpec
from tests.search.scripted_engine import ScriptedEngine

KEYS = {
    "policy",
    "width",
    "task",
    "n",
    "accuracy",
    "accuracy_diff_ci95",
    "flops",
    "kv_tokens_total",
    "kv_reduction_vs_rebase",
    "kv_ceiling",
    "pool",
    "problems_per_second",
    "throughput_vs_rebase",
    "decision_ms_p50",
    "decision_ms_p99",
    "overhead_vs_replay",
    "tree_digest",
}


async def compare_policies() -> dict[str, Results]:
    """Search three questions by rebase, beam and the ceiling, on the scripted engine."""
    rebase = SearchSpec(policy="rebase", width=8)
    methods = [
        Method("rebase", rebase),
        Method("beam", SearchSpec(policy="beam", width=8)),
        Method("keep one", rebase, lambda spec: KeepOne(spec.width)),
    ]
    items = items_of("game24", "dev", 3, seed=0)
    comparison = await compare(ScriptedEngine(), items, methods, at_once=2, keep_rounds=1)
    return {results.method.name: results for results in comparison}


def timing(rebase: list[float], beam: list[float], replay: list[float]) -> Timing:
    """Times of 8 items with 4 and 8 at once, and of replayed decisions."""
    times = Times(
        {
            ("rebase", 4, LIVE): [8.0, 8.0],
            ("rebase", 4, REPLAY): [8.0, 8.0],
            ("beam", 4, LIVE): beam,
            ("beam", 4, REPLAY): replay,
            ("rebase", 8, LIVE): rebase,
            ("beam", 8, LIVE): [16.0, 16.0],
        }
    )
    decisions = Decisions(seconds=[0.001, 0.003], nodes=[1, 9])
    return Timing(100, 8, times, {"rebase": [decisions], "beam": [decisions]}, same_trees=True)


async def test_a_row_by_hand() -> None:
    """REBASE is best with 8 at once, 2 problems a second; beam with 4 at once, 1 or 2 a second."""
    results = await compare_policies()
    least = results.pop("keep one")
    timings = {
        1.0: timing([4.0, 4.0], [8.0, 8.0], [8.0, 4.0]),
        0.5: timing([4.0, 4.0], [4.0, 4.0], [4.0, 4.0]),
    }
    rows = PolicyCell("game24", 0, results, "rebase", least, 100, timings).rows()
    assert [(r["pool"], r["policy"]) for r in rows] == [
        (1.0, "rebase"),
        (1.0, "beam"),
        (0.5, "rebase"),
        (0.5, "beam"),
    ]
    for r in rows:
        assert r.keys() >= KEYS | set(COLUMNS)
        assert r["n"] == 3
        assert r["decision_ms_p50"] == pytest.approx(2.0)
    rebase, beam = rows[0], rows[1]
    assert (rebase["problems_per_second"], rebase["at_once"]) == (2.0, 8)
    assert (beam["problems_per_second"], beam["at_once"]) == (1.0, 4)
    assert beam["throughput_vs_rebase"] == 0.5
    assert rows[3]["throughput_vs_rebase"] == 1.0
    assert beam["overhead_vs_replay"] == 0.5  # pairs 8/8 and 8/4
    assert rebase["accuracy_diff_ci95"] == [0.0, 0.0]
    total = {name: r.total(lambda s: s.kv_tokens_total) for name, r in results.items()}
    assert beam["kv_reduction_vs_rebase"] == total["rebase"] / total["beam"]
    assert rebase["kv_reduction_vs_rebase"] == 1.0
    assert rebase["kv_ceiling"] == beam["kv_ceiling"] > 1.0


async def test_rounds_are_kept_for_the_first_items_alone() -> None:
    """Only the first ``keep_rounds`` results of a method have rounds."""
    results = await compare_policies()
    has_rounds = [bool(result.rounds) for result in results["rebase"].results]
    assert has_rounds == [True, False, False]


def test_the_largest_weight_that_loses_at_most_a_fifth_of_a_point() -> None:
    """The paper's rule: 0.502 - 0.002 is still harmless, less is not; None if no weight is."""
    sweep = {1.0: 0.51, 1.25: 0.499, 1.5: 0.5, 1.75: 0.4, 2.0: 0.3}
    assert largest_harmless(sweep, 0.502) == 1.5
    assert largest_harmless({1.0: 0.4}, 0.502) is None


def test_choices_are_recorded_by_task_and_width(tmp_path: Path) -> None:
    """A new choice replaces the old one of the same task and width, and no other."""
    path = tmp_path / "chosen.json"
    assert chosen("blocksworld", 16, path) is None
    first = {"task": "blocksworld", "width": 16, budget_weight.FIELD: 1.25}
    record([first, first | {"width": 64}], path)
    record([first | {budget_weight.FIELD: 2.0}], path)
    assert chosen("blocksworld", 16, path) == 2.0
    assert chosen("blocksworld", 64, path) == 1.25
    assert chosen("wordproblem", 64, path) is None


def test_only_ets_takes_a_weight() -> None:
    """The spec of another policy has no budget weight."""
    assert spec_for("beam", 4, "blocksworld") == SearchSpec(policy="beam", width=4)
