"""Means over the cells of `loadtest.goodput`: of one run, or of several, each of some cells."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from loadtest.goodput_rows import BASELINE, PAPER
from loadtest.paired import bootstrap95_by_group

WORSE = 0.97
"""Section 8 of the design: no cell may be significantly below it."""

COLUMNS = (
    "variant",
    "cells",
    "goodput_vs_paper_baseline",
    "goodput_vs_paper_baseline_ci95",
    "goodput_vs_baseline",
    "goodput_vs_baseline_ci95",
    "latency_vs_paper_baseline",
    "generator_vs_paper_baseline",
    "verifier_vs_paper_baseline",
    "ahead_bound",
    "room_bound",
    "cells_below",
    "same_work",
    "identical_trees",
)
_MEASURES = ("goodput", "latency", "generator", "verifier")
_BASES = (PAPER, BASELINE)

Row = Mapping[str, Any]


def summary(found: Sequence[Row]) -> list[dict[str, Any]]:
    """A row a variant: means over cells and how many cells are significantly below ``WORSE`` of
    either baseline's goodput (the interval's upper end is; cells of one pair have none).

    Every number of beams counts alike, as it does where all cells are there: wide cells may be a
    sample. Intervals are over cells, drawn again among those of as many beams.
    """
    names = dict.fromkeys(row["variant"] for row in found)
    return [_summed(name, [row for row in found if row["variant"] == name]) for name in names]


def joined(documents: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of documents that `--json` wrote. Raises ValueError where a cell is in two."""
    rows, seen = [], set[tuple[Any, ...]]()
    for path in documents:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            cell = tuple(row[part] for part in ("pair", "task", "policy", "beams", "pool"))
            if (name := (*cell, row["variant"])) in seen:
                raise ValueError(f"{path}: {' '.join(map(str, cell))} is in another file too")
            seen.add(name)
            rows.append(row)
    return rows


def _summed(name: str, cells: Sequence[Row]) -> dict[str, Any]:
    means: dict[str, Any] = {}
    for key in (f"{what}_vs_{base}" for what in _MEASURES for base in _BASES):
        groups = _by_beams(cells, key)
        means[key] = fmean(map(fmean, groups)) if groups else None
        means[f"{key}_ci95"] = bootstrap95_by_group(groups) if groups else None
    for bound in ("ahead_bound", "room_bound"):
        groups = _by_beams(cells, bound)
        means[bound] = fmean(map(fmean, groups)) if groups else None
    below = {base: sum(_below(row[f"goodput_vs_{base}_ci95"]) for row in cells) for base in _BASES}
    return {
        "variant": name,
        "cells": len(cells),
        **means,
        "cells_below": max(below.values()),
        "cells_below_paper_baseline": below[PAPER],
        "cells_below_baseline": below[BASELINE],
        "same_work": fmean(row["same_work"] for row in cells),
        "identical_trees": fmean(row["identical_trees"] for row in cells),
    }


def _by_beams(cells: Sequence[Row], key: str) -> list[list[float]]:
    """The values known, those of one number of beams together."""
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for row in cells:
        if row[key] is not None:
            groups[row["beams"]].append(row[key])
    return list(groups.values())


def _below(interval: Sequence[float] | None) -> bool:
    return interval is not None and interval[1] < WORSE
