"""Plots accuracy against KV, a line a policy (figure 3 of the ETS paper): ``eval --plot``."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle
from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.typing import RcKeyType

STYLE: dict[RcKeyType, Any] = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "lines.linewidth": 1.3,
    "lines.markersize": 5,
    "legend.frameon": False,
    "pdf.fonttype": 42,
    "ps.fonttype": 42,
    "svg.fonttype": "none",
    "svg.hashsalt": "hedgerow",
}
"""Font sizes for papers; fonts are embedded whole (journals refuse Type 3), text in SVG."""
LOOKS = (
    ("#000000", "o", "-"),
    ("#0072b2", "s", "--"),
    ("#d55e00", "^", "-."),
    ("#009e73", "D", ":"),
    ("#cc79a7", "v", (0, (5, 1))),
    ("#56b4e9", "P", (0, (3, 1, 1, 1))),
    ("#e69f00", "X", (0, (1, 1))),
)
"""Okabe and Ito's colours; markers and dashes distinguish policies in greyscale."""
INCHES = (5.5, 3.6)
DOTS = 300
UNDATED = {".pdf": {"CreationDate": None}, ".svg": {"Date": None}}
"""Metadata without dates, so that the same rows make the same bytes."""


def check_path(path: Path) -> None:
    """Raise ValueError if no plot can be written to ``path``."""
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ValueError(f"{path}: the suffix must be one of {', '.join(sorted(formats))}")
    if not path.parent.is_dir():
        raise ValueError(f"{path}: there is no folder {path.parent}")


def plot(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Plot the rows of one evaluation with their 95 % intervals; the suffix sets the format.

    A point is a width, named beside it; KV is ``kv_tokens_total`` over the smallest of all rows.
    Raises OSError if the file cannot be written.
    """
    with rc_context(STYLE):
        figure = Figure(figsize=INCHES, layout="constrained")
        axes = figure.add_subplot()
        least = min(row["kv_tokens_total"] for row in rows)
        policies = dict.fromkeys(row["policy"] for row in rows)
        for policy, look in zip(policies, cycle(LOOKS), strict=False):
            group = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["width"])
            _line(axes, group, policy, least, look)
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_ylim(0, 1)
        axes.set_xlabel("total KV size (the smallest is 1)")
        axes.set_ylabel("accuracy, with 95 % intervals")
        axes.set_title(f"{rows[0]['task']}, n = {rows[0]['n']}, seed {rows[0]['seed']}")
        axes.grid(color="0.9", linewidth=0.6)
        axes.set_axisbelow(True)
        axes.legend(handlelength=3.2)
        figure.savefig(path, dpi=DOTS, metadata=UNDATED.get(path.suffix))


def draw_line(
    axes: Axes,
    rows: Sequence[dict[str, Any]],
    places: Sequence[float],
    label: str,
    look: tuple[Any, ...],
) -> None:
    """Draw a line through the rows' accuracies at ``places``, with their 95 % intervals."""
    colour, marker, dashes = look
    accuracy = [row["accuracy"] for row in rows]
    below = [row["accuracy"] - row["accuracy_ci95"][0] for row in rows]
    above = [row["accuracy_ci95"][1] - row["accuracy"] for row in rows]
    axes.errorbar(
        places,
        accuracy,
        yerr=[below, above],
        color=colour,
        marker=marker,
        linestyle=dashes,
        elinewidth=0.8,
        capsize=2.5,
        label=label,
    )


def _line(
    axes: Axes, rows: Sequence[dict[str, Any]], policy: str, least: float, look: tuple[Any, ...]
) -> None:
    """Draw one policy's line, by rising width."""
    kv = [row["kv_tokens_total"] / least for row in rows]
    draw_line(axes, rows, kv, policy, look)
    for row, x in zip(rows, kv, strict=True):
        style = {"textcoords": "offset points", "size": 7, "color": look[0]}
        axes.annotate(str(row["width"]), (x, row["accuracy"]), (5, -9), **style)
