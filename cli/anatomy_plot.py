"""Plots losses by policy, width and depth: ``hedgerow eval --plot-anatomy``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cli.accuracy_plot import DOTS, LOOKS, STYLE, UNDATED

INCHES = (9.0, 3.4)
PARTS = (
    ("right", "#009e73"),
    ("selection loss", "#e69f00"),
    ("coverage loss", "0.85"),
)


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the rows of one evaluation; the suffix sets the format.

    Each row is a bar with its accuracy, selection loss and coverage loss. Beside it, by depth, are
    the distinct living lineages and the reward model's AUC. Raises OSError if it cannot be
    written.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        losses, lineages, ranks = figure.subplots(1, 3)
        _losses(losses, rows)
        for row, look in zip(rows, cycle(LOOKS), strict=False):
            label = _label(row)
            _by_depth(lineages, row["anatomy"]["lineages_by_depth"], label, look)
            _by_depth(ranks, row["anatomy"]["auc_by_depth"], label, look)
        lineages.set_ylabel("distinct lineages alive")
        lineages.set_ylim(bottom=0)
        ranks.set_ylabel("AUC of the rewards")
        ranks.set_ylim(0.4, 1.0)
        lineages.legend(fontsize=7)
        figure.suptitle(f"{rows[0]['task']}, n = {rows[0]['n']}, seed {rows[0]['seed']}", size=9)
        figure.savefig(path, dpi=DOTS, metadata=UNDATED.get(path.suffix))


def _label(row: dict[str, Any]) -> str:
    return f"{row['policy']} {row['width']}"


def _losses(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    """Draw a stacked bar for each row: its accuracy and its two losses."""
    labels, start = [_label(row) for row in rows], [0.0] * len(rows)
    shares = [
        [row["accuracy"] for row in rows],
        [row["anatomy"]["selection_loss"] for row in rows],
        [row["anatomy"]["coverage_loss"] for row in rows],
    ]
    for (name, colour), widths in zip(PARTS, shares, strict=True):
        axes.barh(range(len(rows)), widths, left=start, color=colour, label=name)
        start = [a + b for a, b in zip(start, widths, strict=True)]
    axes.set_yticks(range(len(rows)), labels)
    axes.invert_yaxis()
    axes.set_xlim(0, 1)
    axes.legend(fontsize=7, loc="upper center", bbox_to_anchor=(0.5, -0.12), ncols=3)


def _by_depth(
    axes: Axes, values: Sequence[float | None], label: str, look: tuple[Any, ...]
) -> None:
    """Draw a line over depths 1, 2, ..., with gaps for None."""
    colour, marker, dashes = look
    points = [float("nan") if value is None else value for value in values]
    depths = range(1, len(points) + 1)
    axes.plot(depths, points, color=colour, marker=marker, linestyle=dashes, label=label)
    axes.set_xlabel("depth")
    axes.grid(color="0.9", linewidth=0.6)
