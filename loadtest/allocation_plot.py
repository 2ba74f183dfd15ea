"""The plot of ``loadtest.allocation``: accuracy against tokens, panels by task, lines by method."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter

from cli.accuracy_plot import DOTS, LOOKS, STYLE, UNDATED, draw_line

INCHES = (8.0, 5.0)
BESIDE = 2
"""Panels in a row."""


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the rows of ``rows_of``, of one task or several; the suffix gives the format.

    A point is a width, by rising tokens, with its 95 % interval. Raises OSError if the file cannot
    be written.
    """
    tasks = list(dict.fromkeys(row["task"] for row in rows))
    methods = list(dict.fromkeys(row["method"] for row in rows))
    looks = {method: LOOKS[i % len(LOOKS)] for i, method in enumerate(methods)}
    columns = min(BESIDE, len(tasks))
    with rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        panels = figure.subplots(-(-len(tasks) // columns), columns, squeeze=False)
        for task, axes in zip(tasks, panels.flat, strict=False):
            _panel(axes, [row for row in rows if row["task"] == task], looks)
        for unused in panels.flat[len(tasks) :]:
            unused.axis("off")
        lines, names = panels.flat[0].get_legend_handles_labels()
        figure.legend(lines, names, loc="outside right upper", handlelength=3.2)
        figure.supxlabel("generated tokens a search", size=9)
        figure.supylabel("right, with 95 % intervals", size=9)
        figure.savefig(path, dpi=DOTS, metadata=UNDATED.get(path.suffix))


def _panel(axes: Axes, rows: Sequence[dict[str, Any]], looks: dict[str, Any]) -> None:
    """Draw one line per method for a task."""
    for method, look in looks.items():
        mine = sorted((r for r in rows if r["method"] == method), key=lambda r: r["width"])
        draw_line(axes, mine, [row["tokens"] for row in mine], method, look)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:,.0f}")
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    axes.set_title(f"{rows[0]['task']}, {rows[0]['n']} questions, {rows[0]['seeds']} seeds")
    axes.grid(color="0.9", linewidth=0.6)
    axes.set_axisbelow(True)
