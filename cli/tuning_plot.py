"""Plots accuracy against tokens, with the Pareto front: ``hedgerow tune --plot``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cli.accuracy_plot import DOTS, LOOKS, STYLE, UNDATED

INCHES = (6.5, 4.2)
FAINT = 0.25


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Plot a report; the suffix sets the format. Raises OSError if it cannot be written.

    A point is a search, with its 95 % interval if it is in the last rung, faint if it was dropped
    before. A line joins the front, whose points are labelled with width and what they are for.
    """
    rows: Sequence[dict[str, Any]] = report["rows"]
    with rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.add_subplot()
        policies = dict.fromkeys(row["search"]["policy"] for row in rows)
        for policy, look in zip(policies, cycle(LOOKS), strict=False):
            _points(axes, [row for row in rows if row["search"]["policy"] == policy], policy, look)
        front = sorted((row for row in rows if row["front"]), key=lambda row: row["tokens"])
        axes.plot(*_places(front), color="0.5", linewidth=0.8, zorder=0)
        words: dict[tuple[float, float], list[str]] = {}
        for row in front:  # equal votes share one label
            place = row["tokens"], row["accuracy"]
            words.setdefault(place, [str(row["search"]["width"])]).extend(row["chosen"])
        for place, labels in words.items():
            axes.annotate(", ".join(labels), place, (5, -9), textcoords="offset points", size=7)
        axes.set_xscale("log")
        axes.set_ylim(0, 1)
        axes.set_xlabel("generated tokens a search")
        axes.set_ylabel("accuracy, with 95 % intervals")
        questions = report["rungs"][-1]["questions"]
        axes.set_title(f"{report['data']}: up to {questions} questions")
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(fontsize=7)
        figure.savefig(path, dpi=DOTS, metadata=UNDATED.get(path.suffix))


def _points(axes: Axes, rows: Sequence[dict[str, Any]], policy: str, look: tuple[Any, ...]) -> None:
    """Draw the points of one policy's searches."""
    colour, marker, _ = look
    last_rows = [row for row in rows if row["last_rung"]]
    early_rows = [row for row in rows if not row["last_rung"]]
    axes.scatter(*_places(early_rows), color=colour, marker=marker, s=12, alpha=FAINT, linewidths=0)
    ends = [[abs(row["accuracy"] - row["accuracy_ci95"][i]) for row in last_rows] for i in (0, 1)]
    axes.errorbar(
        *_places(last_rows),
        yerr=ends,
        color=colour,
        marker=marker,
        linestyle="none",
        elinewidth=0.6,
        label=policy,
    )


def _places(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float]]:
    return [row["tokens"] for row in rows], [row["accuracy"] for row in rows]
