"""`python -m loadtest.goodput`: rows that can be checked by hand, its cells, a small run."""

from __future__ import annotations

import asyncio
import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from loadtest import goodput
from loadtest.goodput import STEPS, GoodputCell, GoodputPlan, _turns, cells_of, measure
from loadtest.goodput_embedded import VARIANTS, Sided
from loadtest.goodput_rows import (
    COLUMNS,
    SUMMARY_COLUMNS,
    GoodputRun,
    ahead_bound,
    joined,
    paired_ratio,
    rows,
    summary,
)
from loadtest.in_process import ModelsInProcess
from runtime.embedded.options import EngineOptions
from search.engine import Trajectory
from tests.loadtest.command import refused
from tests.runtime.tiny_models import make_checkpoint

KEYS = {
    *("variant", "policy", "task", "pair", "beams", "pool", "precise_goodput"),
    *("goodput_vs_paper_baseline", "goodput_vs_baseline", "goodput_vs_baseline_ci95"),
    *("latency_seconds", "generator_seconds", "verifier_seconds", "slot_utilisation"),
    *("accuracy", "pass_at_n", "identical_trees", "speculated_used", "speculated_wasted"),
    "tree_digest",
}

RUN = GoodputRun(
    digest="aa",
    correct=True,
    any_correct=True,
    goodput=20.0,
    seconds=4.0,
    generator_seconds=3.0,
    verifier_seconds=1.0,
    slots=(0.5, 0.25),
    held_bytes=100,
    path_tokens=10,
    kv_tokens=5,
    prm_kv_tokens=5,
    passes=9,
    least_passes=9,
)


def test_a_ratio_by_hand() -> None:
    """Twice and half as fast on two items is equally fast; an item with no goodput is left out."""
    mean, interval = paired_ratio([(40.0, 20.0), (10.0, 20.0)])
    assert mean == pytest.approx(1.0)
    assert interval == pytest.approx([0.5, 2.0])
    assert paired_ratio([(40.0, 20.0), (0.0, 20.0)]) == (pytest.approx(2.0), None)
    assert paired_ratio([(0.0, 20.0)]) == (None, None)


def test_rows_by_hand() -> None:
    """Two items: the paper's baseline at 20 and 10 tokens a second, ours twice as fast."""
    paper = [RUN, replace(RUN, goodput=10.0, seconds=8.0, correct=False, digest="bb")]
    ours = [replace(run, goodput=2 * run.goodput, seconds=run.seconds / 2) for run in paper]
    p_runs = [replace(ours[0], digest="cc"), replace(ours[1], verifier_seconds=0.25)]
    runs = {"paper_baseline": paper, "baseline": ours, "P": p_runs}
    first, second, third = rows(runs, [replace(run, goodput=30.0) for run in paper])
    assert (first["precise_goodput"], second["precise_goodput"]) == (15.0, 30.0)
    assert first["goodput_vs_paper_baseline"] == 1.0
    assert second["goodput_vs_paper_baseline"] == pytest.approx(2.0)
    assert first["goodput_vs_baseline_ci95"] == pytest.approx([0.5, 0.5])
    assert second["latency_seconds"] == 3.0
    assert second["latency_vs_paper_baseline"] == pytest.approx(0.5)
    assert third["verifier_vs_baseline"] == pytest.approx(math.sqrt(1 * 0.25))
    assert (second["identical_trees"], third["identical_trees"]) == (1.0, 0.5)
    assert (first["accuracy"], first["pass_at_n"]) == (0.5, 1.0)
    assert first["slot_utilisation"] == pytest.approx(0.375)
    # With room for everything both items run at 30 tokens a second; our baseline has 40 and 20.
    assert third["room_bound"] == pytest.approx(math.sqrt(30 / 40 * 30 / 20))
    assert first["tree_digest"] == second["tree_digest"] != third["tree_digest"]


def test_repeats_are_pairs_of_their_own() -> None:
    """One item twice: 1.2 and 0.8 times as fast; the second run reads one more token."""
    base = [replace(RUN, prm_tokens=5)] * 2
    mine = [replace(base[0], goodput=24.0), replace(base[1], goodput=16.0, prm_tokens=6)]
    (row,) = rows({"paper_baseline": base, "baseline": base, "P": mine}, [RUN])[2:]
    assert (row["n"], row["identical_trees"], row["same_work"]) == (2, 1.0, 0.5)
    assert row["goodput_vs_baseline"] == pytest.approx(math.sqrt(1.2 * 0.8))
    assert row["goodput_vs_baseline_ci95"] == pytest.approx([0.8, 1.2])
    (once,) = rows({"paper_baseline": base[:1], "baseline": base[:1]}, [RUN])[:1]
    assert once["tree_digest"] == row["tree_digest"]


def test_what_drawing_ahead_could_win_by_hand() -> None:
    """Of 20 passes 16 are the longest path's: a fifth is slack. Half of the speculation is used."""
    base = [replace(RUN, passes=20, least_passes=16)]
    half = [replace(RUN, speculated_used=5, speculated_wasted=5)]
    assert ahead_bound(half, base) == pytest.approx(1 / 0.9)
    assert ahead_bound([RUN], base) == pytest.approx(1 / 0.8)
    assert ahead_bound(half, [replace(RUN, passes=20, least_passes=20)]) == 1.0


def test_a_summary_by_hand() -> None:
    """Ratios 2 and 0.9 have mean 1.45, and one cell is below; an interval of 0.96 to 1 is not."""
    paper = [RUN] * 2

    def cell(ratio: float, beams: int = 8) -> list[dict[str, Any]]:
        mine = [replace(RUN, goodput=20.0 * ratio)] * 2
        cell = rows({"paper_baseline": paper, "baseline": paper, "SMP": mine}, paper)
        return [row | {"beams": beams} for row in cell]

    by_variant = {row["variant"]: row for row in summary([*cell(2.0), *cell(0.9)])}
    assert by_variant["SMP"]["cells"] == 2
    assert by_variant["SMP"]["goodput_vs_baseline"] == pytest.approx(1.45)
    assert by_variant["SMP"]["cells_below"] == 1
    assert by_variant["baseline"]["cells_below"] == 0
    unsure = [row | {"goodput_vs_baseline_ci95": [0.96, 1.0]} for row in cell(0.98)]
    assert summary(unsure)[2]["cells_below"] == 0
    # Twice as many narrow cells as wide ones count no more: (2 + 0.9) / 2 and 3 are 2.225.
    wide = summary([*cell(2.0), *cell(0.9), *cell(3.0, 64)])[2]
    assert wide["goodput_vs_baseline"] == pytest.approx(2.225)
    assert wide["goodput_vs_baseline_ci95"] == pytest.approx([1.95, 2.5])


def test_runs_of_some_cells_each_are_summed_up_once(tmp_path: Path) -> None:
    """Two files of different cells are joined; a cell in both is an error that names it."""
    about = {"pair": "equal", "task": "game24", "policy": "beam", "pool": 1.0, "variant": "P"}
    files = [tmp_path / "8.json", tmp_path / "16.json"]
    for beams, path in zip((8, 16), files, strict=True):
        path.write_text(json.dumps({"rows": [about | {"beams": beams}]}))
    assert [row["beams"] for row in joined(files)] == [8, 16]
    with pytest.raises(ValueError, match=r"8\.json: equal game24 beam 8 1\.0 is in another file"):
        joined([*files, files[0]])


def test_cells() -> None:
    """Every pair has every policy, width and pool; ``steps`` is beam search with fixed lengths."""
    cells = list(cells_of(GoodputPlan(policies=("beam", STEPS), widths=(8, 512), pairs=("equal",))))
    assert len(cells) == 2 * 2 * 2 * 3
    assert {cell.task for cell in cells} == {"blocksworld", "wordproblem"}
    spec = GoodputCell("equal", "game24", STEPS, 8, 1.0).spec
    assert (spec.policy, spec.width, spec.step_tokens, spec.max_step_tokens) == ("beam", 8, 32, 32)
    assert GoodputCell("equal", "game24", "dvts", 8, 1.0).spec.step_tokens is None
    hot = [
        cell.spec.temperature for cell in cells_of(GoodputPlan(pairs=("equal",), temperature=2.0))
    ]
    assert set(hot) == {2.0}


def test_some_cells_at_random() -> None:
    """``sample`` cells in the plan's order, the same for the same seed."""
    plan = GoodputPlan(sample=20)
    sample, every = cells_of(plan), cells_of(GoodputPlan())
    assert len(sample) == len(set(sample)) == 20
    assert sample == [cell for cell in every if cell in sample] == cells_of(plan)
    assert sample != cells_of(replace(plan, seed=1))
    narrow, wide = (cells_of(replace(plan, widths=(n,))) for n in (8, 16))
    assert [replace(cell, width=16) for cell in narrow] != wide
    assert cells_of(GoodputPlan(sample=10_000)) == every


def test_variants_take_turns() -> None:
    """Two items by two variants, twice each; every other turn runs backwards."""
    by_item = list(_turns(GoodputPlan(variants=("P", "MP"), repeats=2), 2))
    assert by_item[:4] == [(0, "P"), (0, "MP"), (0, "MP"), (0, "P")]
    assert by_item[4:] == [(1, "MP"), (1, "P"), (1, "P"), (1, "MP")]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A tiny random policy and a tiny random reward model."""
    folder = tmp_path_factory.mktemp("models")
    size = {"max_position_embeddings": 272, "num_hidden_layers": 1}
    policy = make_checkpoint(folder / "policy", "llama", seed=1, **size)
    return policy, make_checkpoint(folder / "prm", "llama", seed=2, **size)


def test_whole_prefixes_score_the_same_and_are_read_whole(models: tuple[Path, Path]) -> None:
    """Two steps below one prefix: every token of both paths is read, again in the next round."""
    loaded = ModelsInProcess(EngineOptions(policy=models[0], prm=models[1], threads=1))
    step = tuple(range(40, 60))
    rounds = [
        [Trajectory(1, (step,), ("",)), Trajectory(2, (step[:10],), ("",))],
        [Trajectory(3, (step, (65, 66)), ("", ""))],
    ]
    rewards, tokens_read = {}, {}
    for whole in (True, False):
        engine = Sided(loaded, clock=_zero_clock, whole_prefix=whole, kv_tokens=500)

        async def score(engine: Sided = engine) -> list[list[float]]:
            return [await engine.score("t", tuple(range(30)), "", each) for each in rounds]

        rewards[whole] = asyncio.run(score())
        tokens_read[whole] = engine.whole_tokens or asyncio.run(engine.release("t")).prm_tokens
    assert rewards[True] == rewards[False]
    tags = 1 + 1 + 2
    assert tokens_read[True] == 3 * 30 + 20 + 10 + 22 + tags
    assert tokens_read[False] < tokens_read[True] - 2 * 20


@pytest.mark.slow
@pytest.mark.promise("Every variant in the goodput benchmark grows the same trees.")
def test_a_small_run(models: tuple[Path, Path]) -> None:
    """Rows have every key, and every variant grows the same trees."""
    plan = GoodputPlan(
        tasks=("game24",),
        policies=("beam",),
        widths=(3,),
        pools=(1.0,),
        pairs=("verifier-heavy",),
        questions=1,
        repeats=2,
        batch_limit=2,
    )
    document = asyncio.run(measure(plan, models))
    cell_rows = document["rows"]
    assert [row["variant"] for row in cell_rows] == list(VARIANTS)
    for row in cell_rows:
        assert row.keys() >= KEYS | set(COLUMNS)
        assert row["identical_trees"] == 1.0
        assert row["tree_digest"] == cell_rows[0]["tree_digest"]
        assert row["pool_bytes"] == cell_rows[0]["pool_bytes"]
        assert 0 < row["slot_utilisation"] <= 1
        assert row["generator_seconds"] + row["verifier_seconds"] <= row["latency_seconds"]
    by_name = {row["variant"]: row for row in cell_rows}
    assert by_name["paper_baseline"]["prm_tokens"] > by_name["baseline"]["prm_tokens"]
    assert by_name["MP"]["kv_tokens"] != by_name["P"]["kv_tokens"]
    assert by_name["SMP"]["speculated_used"] + by_name["SMP"]["speculated_wasted"] > 0
    assert all(row.keys() >= set(SUMMARY_COLUMNS) for row in document["summary"])
    assert document["left_out"] == []


def test_what_there_is_no_time_for_is_named(models: tuple[Path, Path]) -> None:
    """``left_out`` names the cells that were not started."""
    plan = GoodputPlan(policies=("beam",), widths=(8,), pools=(1.0,), seconds=-1.0)
    document = asyncio.run(measure(plan, models))
    assert document["rows"] == []
    assert len(document["left_out"]) == 2 * 3
    assert document["left_out"][0] == "equal blocksworld beam 8 1"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--policy", "bean"], "bean: known are"),
        (["--pool", "0"], "0: must be values above 0"),
        (["--width", "x"], "x: must be numbers"),
        (["--limit", "0"], "0: must be at least 1"),
    ],
)
def test_a_wrong_switch_is_refused(
    words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the option, its value and what is allowed."""
    assert message in refused(goodput.main, words, monkeypatch)


def _zero_clock() -> float:
    return 0.0
