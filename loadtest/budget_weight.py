"""λb of ETS by the paper's rule: the largest of a sweep that loses at most 0.2 points on dev.

The chosen weights are in `budget_weight.json` beside this file, by task and width, with the
accuracies that decided.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.compare import compare
from loadtest.report import say
from loadtest.searches import Item, Method, items_of
from search.engine import Engine
from search.spec import SearchSpec

SWEEP = (0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 2.5, 3.0, 3.5, 4.0)
"""The paper sweeps [1, 2] (section 5.1) and does not say in which steps. Where the reward model is
sure, trees are narrow, and only larger weights prune any further: so the sweep goes up to 4. Where
few branches can go on, the weight 1 prunes the right one too: so the sweep begins at 0.25."""

MOST_LOST = 0.002
FILE = Path(__file__).with_suffix(".json")
FIELD = "budget_weight"
WEIGHTED = ("ets", "ets_kv")
"""Policies that take the weight; it is chosen by searches of the first one."""

COLUMNS = ("task", "width", "n", FIELD, "accuracy_rebase", "accuracy", "tree_digest")


def largest_harmless(accuracy: Mapping[float, float], baseline: float) -> float | None:
    """The largest weight whose accuracy is at most MOST_LOST below ``baseline``; None if none is.

    Accuracies are fractions; 1e-9 forgives their rounding.
    """
    harmless = [w for w, share in accuracy.items() if share >= baseline - MOST_LOST - 1e-9]
    return max(harmless, default=None)


def chosen(task: str, width: int, path: Path = FILE) -> float | None:
    """The weight chosen for a task and width; None if none was."""
    if not path.is_file():
        return None
    rows = json.loads(path.read_text())
    return next((r[FIELD] for r in rows if (r["task"], r["width"]) == (task, width)), None)


def spec_for(policy: str, width: int, task: str) -> SearchSpec:
    """A policy's spec, for ETS with the weight chosen for the task and width."""
    weight = chosen(task, width) if policy in WEIGHTED else None
    fields: dict[str, Any] = {"policy": policy, "width": width}
    return SearchSpec.model_validate(fields if weight is None else fields | {FIELD: weight})


async def choose(
    engine: Engine,
    task: str,
    widths: Sequence[int],
    limit: int,
    seed: int,
    at_once: int,
    kept_in: Path | None = None,
) -> list[dict[str, Any]]:
    """A row per width, from ``limit`` dev questions; the smallest weight if all lose too much."""
    items: list[Item] = items_of(task, "dev", limit, seed)
    rows = []
    for width in widths:
        base = SearchSpec(policy="rebase", width=width)
        ets = {"policy": "ets", "width": width}
        specs = {w: SearchSpec.model_validate(ets | {FIELD: w}) for w in SWEEP}
        methods = [Method(f"ets {weight}", spec) for weight, spec in specs.items()]
        rebase, *swept = await compare(
            engine, items, [Method("rebase", base), *methods], at_once=at_once, kept_in=kept_in
        )
        shares = {w: results.accuracy for w, results in zip(SWEEP, swept, strict=True)}
        harmless = largest_harmless(shares, rebase.accuracy)
        weight = min(SWEEP) if harmless is None else harmless
        say(f"{task}, width {width}: {weight} of {shares}, rebase {rebase.accuracy:.4f}")
        rows.append(
            {
                "task": task,
                "width": width,
                "n": len(items),
                "seed": seed,
                FIELD: weight,
                "harmless": harmless is not None,
                "accuracy_rebase": rebase.accuracy,
                "accuracy": shares[weight],
                "sweep": {str(w): share for w, share in shares.items()},
                "tree_digest": swept[SWEEP.index(weight)].digest,
            }
        )
    return rows


def record(rows: Sequence[dict[str, Any]], path: Path = FILE) -> None:
    """Write the chosen weights, replacing those of the same tasks and widths."""
    new = {(row["task"], row["width"]) for row in rows}
    old = json.loads(path.read_text()) if path.is_file() else []
    unchanged = [row for row in old if (row["task"], row["width"]) not in new]
    merged = sorted([*unchanged, *rows], key=lambda row: (row["task"], row["width"]))
    path.write_text(json.dumps(merged, indent=2) + "\n")
