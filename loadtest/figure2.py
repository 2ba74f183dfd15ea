"""Figure 2 of ETS: what FLOPs, model calls and KV say of a search's time, and what they do not."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

REFERENCE = "beam"
QUANTITIES = {"flops": "FLOPs", "model_calls": "model calls", "kv_size": "KV size", "time": "time"}


def normalised(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Per policy, FLOPs, model calls, KV and time a problem over those of beam search.

    At each task's widest width in its largest pool; where beam was not measured, over the task's
    first policy, which ``relative_to`` then names.
    """
    found = []
    for task in dict.fromkeys(row["task"] for row in rows):
        of_task = [row for row in rows if row["task"] == task]
        at = max((row["width"], row["pool"]) for row in of_task)
        cell = [row for row in of_task if (row["width"], row["pool"]) == at]
        base = next((row for row in cell if row["policy"] == REFERENCE), cell[0])
        found += [
            {
                "task": task,
                "policy": row["policy"],
                "width": row["width"],
                "relative_to": base["policy"],
                "flops": row["flops"] / base["flops"],
                "model_calls": row["model_calls"] / base["model_calls"],
                "kv_size": row["kv_tokens_total"] / base["kv_tokens_total"],
                "time": base["problems_per_second"] / row["problems_per_second"],
            }
            for row in cell
        ]
    return found


def draw(bars: Sequence[dict[str, Any]], path: Path) -> None:
    """Groups of bars, a panel a task; the suffix gives the format. Raises OSError."""
    tasks = list(dict.fromkeys(bar["task"] for bar in bars))
    figure = Figure(figsize=(6.4 * len(tasks), 4.2), layout="constrained")
    for axes, task in zip(figure.subplots(1, len(tasks), squeeze=False)[0], tasks, strict=True):
        mine = [bar for bar in bars if bar["task"] == task]
        size = 0.8 / len(mine)
        for i, bar in enumerate(mine):
            at = [q + (i - (len(mine) - 1) / 2) * size for q in range(len(QUANTITIES))]
            axes.bar(at, [bar[q] for q in QUANTITIES], size, label=bar["policy"])
        axes.set_xticks(range(len(QUANTITIES)), list(QUANTITIES.values()))
        axes.set_ylabel(f"relative to {mine[0]['relative_to']}")
        axes.set_title(f"{task}, width {mine[0]['width']}")
        axes.legend()
    figure.savefig(path)
