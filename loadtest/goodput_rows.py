"""Rows of `loadtest.goodput`: measurements of each engine variant in a budget; and means over
the cells of one run or of several, each of some cells."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from statistics import fmean
from typing import Any

from cli.evaluation import judge
from loadtest.paired import bootstrap95, bootstrap95_by_group
from loadtest.searches import Item
from models.tasks import TASKS
from search.outcome import Outcome
from search.stats import path_length
from search.tree import combined_digest

PAPER, BASELINE = "paper_baseline", "baseline"

COLUMNS = (
    "pair",
    "policy",
    "beams",
    "pool",
    "variant",
    "precise_goodput",
    "goodput_vs_paper_baseline",
    "goodput_vs_baseline",
    "goodput_vs_baseline_ci95",
    "latency_seconds",
    "generator_seconds",
    "verifier_seconds",
    "slot_utilisation",
    "ahead_bound",
    "room_bound",
    "same_work",
    "identical_trees",
)


WORSE = 0.97
"""The ratio that no cell may be significantly below (section 8 of the design)."""

SUMMARY_COLUMNS = (
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


def summary(cells: Sequence[Row]) -> list[dict[str, Any]]:
    """A row per variant: means over cells and how many cells are significantly below ``WORSE`` of
    either baseline's goodput (the interval's upper end is; cells of one pair have none).

    Every number of beams has the same weight, as if all cells were there: wide cells may be a
    sample. Intervals are bootstrapped over cells, within each number of beams.
    """
    names = dict.fromkeys(row["variant"] for row in cells)
    return [_summed(name, [row for row in cells if row["variant"] == name]) for name in names]


def joined(documents: Iterable[Path]) -> list[dict[str, Any]]:
    """The rows of documents that `--json` wrote. Raises ValueError where a cell is in two."""
    rows, names = [], set[tuple[Any, ...]]()
    for path in documents:
        for row in json.loads(path.read_text(encoding="utf-8"))["rows"]:
            cell = tuple(row[part] for part in ("pair", "task", "policy", "beams", "pool"))
            if (name := (*cell, row["variant"])) in names:
                raise ValueError(f"{path}: {' '.join(map(str, cell))} is in another file too")
            names.add(name)
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
    below = [sum(_below(row[f"goodput_vs_{base}_ci95"]) for row in cells) for base in _BASES]
    return {
        "variant": name,
        "cells": len(cells),
        **means,
        "cells_below": max(below),
        "same_work": fmean(row["same_work"] for row in cells),
        "identical_trees": fmean(row["identical_trees"] for row in cells),
    }


def _by_beams(cells: Sequence[Row], key: str) -> list[list[float]]:
    """The values that are not None, grouped by the number of beams."""
    groups: defaultdict[int, list[float]] = defaultdict(list)
    for row in cells:
        if row[key] is not None:
            groups[row["beams"]].append(row[key])
    return list(groups.values())


def _below(interval: Sequence[float] | None) -> bool:
    return interval is not None and interval[1] < WORSE


@dataclass(frozen=True, slots=True)
class GoodputRun:
    """One search by one variant. Seconds are by the benchmark's clock.

    ``goodput``: precise goodput in tokens a second, as ``search.stats.SearchStats`` defines it
    (FlashTTS, section 6.1). ``slots``: of each round, the mean share of the batch's places that a
    pass of the generator filled. ``held_bytes``: KV that both models held at most; ``path_tokens``:
    the longest path with its next step. ``kv_tokens`` and ``prm_kv_tokens``: the two pools.
    ``passes``: of the generator; ``least_passes``: the fewest in which any order of work could draw
    as much, since a path's tokens follow each other and a pass has few places.
    """

    digest: str
    correct: bool
    any_correct: bool
    goodput: float
    seconds: float
    generator_seconds: float
    verifier_seconds: float
    slots: tuple[float, ...]
    held_bytes: int
    path_tokens: int
    kv_tokens: int
    prm_kv_tokens: int
    passes: int
    least_passes: int
    prm_tokens: int = 0
    rehydrated_tokens: int = 0
    speculated_used: int = 0
    speculated_wasted: int = 0

    @classmethod
    def of(
        cls,
        item: Item,
        outcome: Outcome,
        *,
        seconds: Mapping[str, float],
        whole_tokens: int,
        full_passes: int,
        **measured: Any,
    ) -> GoodputRun:
        """The run of a search. ``seconds``: of the calls, by name; ``whole_tokens``: read by the
        verifier beyond what the engine counted; ``full_passes``: the number of passes if no place
        were empty; ``measured``: further fields."""
        tree = outcome.tree
        longest = max(path_length(tree, node.id) for node in tree.nodes)
        cost, trial = outcome.stats.engine, judge(TASKS[item.task], item.question, outcome)
        return cls(
            digest=outcome.digest,
            correct=trial.correct,
            any_correct=trial.any_correct,
            goodput=outcome.stats.precise_goodput,
            seconds=outcome.stats.seconds,
            generator_seconds=seconds["expand"],
            verifier_seconds=seconds["score"],
            prm_tokens=cost.prm_tokens + whole_tokens,
            rehydrated_tokens=cost.rehydrated_tokens,
            speculated_used=cost.speculated_used,
            speculated_wasted=cost.speculated_wasted,
            least_passes=max(longest, full_passes),
            **measured,
        )


def rows(
    runs: Mapping[str, Sequence[GoodputRun]], whole: Sequence[GoodputRun]
) -> list[dict[str, Any]]:
    """A row per variant, means over items and repeats. ``runs``: each variant's, all items and then
    all again; ``whole``: the baseline's runs of the items with room for everything."""
    return [{"variant": name} | _row(mine, runs, whole) for name, mine in runs.items()]


def _row(
    mine: Sequence[GoodputRun],
    runs: Mapping[str, Sequence[GoodputRun]],
    whole: Sequence[GoodputRun],
) -> dict[str, Any]:
    n, reference = len(mine), [run.digest for run in whole]

    def mean(field: str) -> float:
        return math.fsum(getattr(run, field) for run in mine) / n

    shares = [share for run in mine for share in run.slots]
    digests = [run.digest for run in mine]
    return {
        "n": n,
        "precise_goodput": mean("goodput"),
        **_ratios("goodput", mine, runs, "goodput"),
        "latency_seconds": mean("seconds"),
        "generator_seconds": mean("generator_seconds"),
        "verifier_seconds": mean("verifier_seconds"),
        **_ratios("latency", mine, runs, "seconds"),
        **_ratios("generator", mine, runs, "generator_seconds"),
        **_ratios("verifier", mine, runs, "verifier_seconds"),
        "slot_utilisation": math.fsum(shares) / len(shares),
        "passes": mean("passes"),
        "ahead_bound": ahead_bound(mine, runs[BASELINE]),
        "room_bound": room_bound(runs[BASELINE], whole),
        "accuracy": mean("correct"),
        "pass_at_n": mean("any_correct"),
        "same_work": sum(map(_same_work, mine, runs[BASELINE])) / n,
        "identical_trees": sum(a == b for a, b in zip(digests, cycle(reference), strict=False)) / n,
        "speculated_used": mean("speculated_used"),
        "speculated_wasted": mean("speculated_wasted"),
        "prm_tokens": mean("prm_tokens"),
        "rehydrated_tokens": mean("rehydrated_tokens"),
        "kv_tokens": mine[0].kv_tokens,
        "prm_kv_tokens": mine[0].prm_kv_tokens,
        "tree_digest": combined_digest(digests[: len(reference)]),
    }


def _ratios(
    name: str, mine: Sequence[GoodputRun], runs: Mapping[str, Sequence[GoodputRun]], field: str
) -> dict[str, Any]:
    """Ratios of a field to both baselines, paired by item: geometric means and intervals."""
    ratios: dict[str, Any] = {}
    for base in (PAPER, BASELINE):
        pairs = [
            (getattr(run, field), getattr(other, field))
            for run, other in zip(mine, runs[base], strict=True)
        ]
        ratios[f"{name}_vs_{base}"], ratios[f"{name}_vs_{base}_ci95"] = paired_ratio(pairs)
    return ratios


def _same_work(mine: GoodputRun, base: GoodputRun) -> bool:
    """Whether two runs made as many passes, and scored, reread and wasted as many tokens."""
    fields = ("passes", "prm_tokens", "rehydrated_tokens", "speculated_wasted")
    return all(getattr(mine, field) == getattr(base, field) for field in fields)


def ahead_bound(mine: Sequence[GoodputRun], base: Sequence[GoodputRun]) -> float:
    """How many times as fast drawing ahead could make the generator if a pass cost the same however
    full: 1 / (1 - slack x hit rate).

    Slack: the share of the baseline's passes that a perfect order would save; hit rate: of what was
    drawn ahead, the share that was used, 1 if nothing was.
    """
    passes, least = sum(run.passes for run in base), sum(run.least_passes for run in base)
    used, wasted = (sum(getattr(r, f"speculated_{of}") for r in mine) for of in ("used", "wasted"))
    hits = used / (used + wasted) if used + wasted else 1.0
    return 1 / (1 - hits * (1 - min(1.0, least / passes)))


def room_bound(base: Sequence[GoodputRun], whole: Sequence[GoodputRun]) -> float | None:
    """The baseline's goodput with room for everything over its goodput in the pool: no order and
    no split of a pool can win more. ``whole``: by item, as in ``rows``."""
    pairs = zip(cycle(whole), base, strict=False)
    return paired_ratio([(roomy.goodput, tight.goodput) for roomy, tight in pairs])[0]


def paired_ratio(
    pairs: Sequence[tuple[float, float]],
) -> tuple[float | None, list[float] | None]:
    """The geometric mean of (mine / base) over the pairs and its 95 % interval, by a bootstrap over
    them; None for the interval of one pair. Pairs with a zero (nothing finished) are left out;
    (None, None) if all are."""
    logs = [math.log(mine / base) for mine, base in pairs if mine > 0 and base > 0]
    if not logs:
        return None, None
    mean = math.exp(math.fsum(logs) / len(logs))
    return mean, [math.exp(end) for end in bootstrap95(logs)] if len(logs) > 1 else None
