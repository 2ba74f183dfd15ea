"""Accuracy against width, a line a policy: what ``hedgerow eval --plot`` draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure


def check_path(path: Path) -> None:
    """Raise ValueError if no plot can be written there."""
    known = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in known:
        raise ValueError(f"{path}: the suffix must be one of {', '.join(sorted(known))}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the rows of one evaluation with their 95 % intervals; the suffix gives the format.

    Raises OSError if the file cannot be written.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["width"])
        below = [r["accuracy"] - r["accuracy_ci95"][0] for r in mine]
        above = [r["accuracy_ci95"][1] - r["accuracy"] for r in mine]
        axes.errorbar(
            [r["width"] for r in mine],
            [r["accuracy"] for r in mine],
            yerr=[below, above],
            marker="o",
            capsize=3,
            label=policy,
        )
    axes.set_xscale("log", base=2)
    axes.set_xticks(sorted({r["width"] for r in rows}), labels=None)
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set_ylim(0, 1)
    axes.set_xlabel("width (trajectories)")
    axes.set_ylabel("accuracy")
    axes.set_title(f"{rows[0]['task']}, n = {rows[0]['n']}, seed {rows[0]['seed']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
