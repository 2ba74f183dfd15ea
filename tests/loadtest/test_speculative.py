"""`python -m loadtest.speculative`: its cells, and a small one with real models."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from loadtest.drafting import GENERATOR
from loadtest.speculative import (
    AUTOMATIC,
    DRAFTED,
    PAPERS,
    PLAIN,
    SpeculativeCell,
    full_cells,
    measure,
    never_slower,
    quick_cells,
)

KEYS = {
    *("mode", "rule", "k_config", "verify_batch", "cost_ratio", "task", "temperature", "thoughts"),
    *("tokens_per_second", "speedup_vs_ar_serial", "speedup_vs_ar_batched", "acceptance"),
    *("target_idle_share", "tree_digest"),
}
MODES = {"ar_serial", "ar_batched", "sd", "sd_scheduled", "mcsd", "mcsd_scheduled"}


def test_every_mode_meets_both_rules() -> None:
    """The cells have all six modes, both rules, one to eight thoughts, three ratios and both
    temperatures; others compare the automatic mode with plain decoding where it hardly wins."""
    cells = full_cells()
    kinds = {kind for cell in cells for kind in cell.kinds}
    assert {kind.mode for kind in kinds} == MODES
    assert {(k.mode, k.rule) for k in DRAFTED} == {
        (mode, rule) for mode in MODES if "sd" in mode for rule in ("coupled", "leviathan")
    }
    seeds = [cell for cell in cells if cell not in never_slower()]
    assert {cell.thoughts for cell in seeds} == set(range(1, 9))
    assert {cell.cost_ratio for cell in seeds} == {5.0, 10.0, 30.0}
    assert {cell.policy for cell in seeds} == {"tot_bfs"}
    for cell in never_slower(2):
        assert (cell.depth, cell.kinds) == (2, (*PLAIN, AUTOMATIC))
    assert {(cell.cost_ratio, cell.policy) for cell in never_slower()} == {
        (1.0, "tot_bfs"),
        (1.0, "rebase"),
        (10.0, "rebase"),
    }
    assert {cell.temperature for cell in cells} == {0.2, 1.0}
    assert {kind.verify_batch for kind in kinds} == {0, 1, 2, 4}
    for cell in (*cells, *quick_cells()):
        assert cell.kinds[:2] == PLAIN


@pytest.mark.slow
def test_a_small_cell_grows_the_same_trees() -> None:
    """With the bundled policy and two thoughts all ways under the coupled rule grow one tree, and
    drafts save passes."""
    kinds = (*PLAIN, *DRAFTED[:2], replace(DRAFTED[3], rule="leviathan"), PAPERS, AUTOMATIC)
    document = asyncio.run(
        measure([SpeculativeCell(1.0, "game24", 1.0, 2, kinds, 2)], 1, 1, seconds=float("inf"))
    )
    rows = [row for row in document["rows"] if row["part"] == GENERATOR]
    assert len(rows) == len(kinds)
    for row, kind in zip(rows, kinds, strict=True):
        assert row.keys() >= KEYS
        assert row["same_trees"] or kind.rule == "leviathan"
        assert 0 <= row["target_idle_share"] < 1
        if kind.k_config:
            assert row["acceptance"] > 0.5
            assert row["tokens_per_target_pass"] > 1.5
