"""Figure 3 of ArborKV: KV over time, what the active paths take and what is only remembered."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

FULL = "full"


@dataclass(frozen=True, slots=True)
class Moment:
    """After an iteration: forward passes so far, tokens that are being read, tokens held."""

    passes: int
    active: int
    held: int


def draw(moments: Mapping[str, Sequence[Moment]], path: Path) -> None:
    """A panel for each way to keep KV but the full one, which is drawn behind all of them.

    ``moments``: a search's, by what its panel is called. The suffix gives the format. Raises
    OSError.
    """
    names = [name for name in moments if name != FULL] or [FULL]
    figure = Figure(figsize=(4.8 * len(names), 3.6), layout="constrained")
    panels = figure.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(panels, names, strict=True):
        behind, mine = moments[FULL], moments[name]
        axes.plot([m.passes for m in behind], [m.held for m in behind], color="0.6", label=FULL)
        at = [m.passes for m in mine]
        active = [min(m.active, m.held) for m in mine]
        axes.stackplot(
            at,
            active,
            [m.held - a for m, a in zip(mine, active, strict=True)],
            labels=("active paths", "inactive"),
            colors=("tab:blue", "lightsteelblue"),
        )
        axes.set_title(name)
        axes.set_xlabel("forward passes")
    panels[0].set_ylabel("KV tokens held")
    panels[0].legend(loc="upper left")
    figure.savefig(path)
