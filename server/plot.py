"""Accuracy against KV, a line a policy (figure 3 of the ETS paper): ``hedgerow eval --plot``."""

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

    A point is a width, named beside it; KV is ``kv_tokens_total`` over the smallest of all rows.
    Raises OSError if the file cannot be written.
    """
    figure = Figure(figsize=(6.4, 4.2), layout="constrained")
    axes = figure.add_subplot()
    least = min(row["kv_tokens_total"] for row in rows)
    for policy in dict.fromkeys(row["policy"] for row in rows):
        mine = sorted((r for r in rows if r["policy"] == policy), key=lambda r: r["width"])
        kv = [row["kv_tokens_total"] / least for row in mine]
        accuracy = [row["accuracy"] for row in mine]
        below = [r["accuracy"] - r["accuracy_ci95"][0] for r in mine]
        above = [r["accuracy_ci95"][1] - r["accuracy"] for r in mine]
        axes.errorbar(kv, accuracy, yerr=[below, above], marker="o", capsize=3, label=policy)
        for row, x, y in zip(mine, kv, accuracy, strict=True):
            axes.annotate(str(row["width"]), (x, y), (4, 4), textcoords="offset points", size=7)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_ylim(0, 1)
    axes.set_xlabel("total KV size (the smallest is 1)")
    axes.set_ylabel("accuracy")
    axes.set_title(f"{rows[0]['task']}, n = {rows[0]['n']}, seed {rows[0]['seed']}")
    axes.grid(alpha=0.3)
    axes.legend()
    figure.savefig(path)
