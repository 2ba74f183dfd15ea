"""From which distance on steps are unlike, for ETS: by what a threshold does to accuracy on dev."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.compare import compare
from loadtest.searches import Method, items_of
from search.engine import Engine
from search.spec import SearchSpec

SWEEP: Mapping[str, Sequence[float]] = {
    "hidden": (0.02, 0.05, 0.1, 0.2, 0.4),
    "lexical": (0.1, 0.2, 0.4, 0.6),
}
"""Cosine distances by embedder. At the largest of them nearly all steps of a round are alike."""

WEIGHT = 1.5
"""ETS's budget weight meanwhile: the middle of what the paper sweeps."""

COLUMNS = ("embedder", "threshold", "width", "n", "accuracy", "accuracies", "kv_reductions")


def best(accuracy: Mapping[float, float]) -> float:
    """The threshold with the highest accuracy; of several the smallest, which tells more apart.

    Accuracies are fractions; 1e-9 forgives their rounding.
    """
    return min(accuracy, key=lambda threshold: (-round(accuracy[threshold], 9), threshold))


async def sweep(
    engine: Engine,
    embedder: str,
    tasks: Sequence[str],
    width: int,
    limit: int,
    seed: int,
    at_once: int,
    kept_in: Path | None = None,
) -> list[dict[str, Any]]:
    """A row a threshold of the engine's embedder, from ``limit`` dev questions of every task.

    ``accuracy`` is the mean over the tasks, ``chosen`` whether it is ``best``; ``accuracies`` and
    ``kv_reductions``, against REBASE, are the tasks' own.
    """
    ets = {"policy": "ets", "width": width, "budget_weight": WEIGHT}
    specs = [
        SearchSpec.model_validate(ets | {"cluster_threshold": value}) for value in SWEEP[embedder]
    ]
    methods = [Method(f"{embedder} {spec.cluster_threshold}", spec) for spec in specs]
    rebase = Method("rebase", SearchSpec(policy="rebase", width=width))
    found = {
        task: await compare(
            engine,
            items_of(task, "dev", limit, seed),
            [rebase, *methods],
            at_once=at_once,
            kept_in=kept_in,
        )
        for task in tasks
    }
    rows = []
    for number, threshold in enumerate(SWEEP[embedder], start=1):
        accuracies = {task: results[number].accuracy for task, results in found.items()}
        kv = {
            task: [r.total(lambda s: s.kv_tokens_total) for r in (results[0], results[number])]
            for task, results in found.items()
        }
        rows.append(
            {
                "embedder": embedder,
                "threshold": threshold,
                "width": width,
                "n": limit,
                "accuracy": sum(accuracies.values()) / len(accuracies),
                "accuracies": accuracies,
                "kv_reductions": {task: base / mine for task, (base, mine) in kv.items()},
            }
        )
    chosen = best({row["threshold"]: row["accuracy"] for row in rows})
    return [row | {"chosen": row["threshold"] == chosen} for row in rows]
