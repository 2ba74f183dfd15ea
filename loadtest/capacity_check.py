"""The capacity model's two claims that a CPU can judge, measured on the bundled models.

A search's time is a fixed cost per pass and a cost per row, so a straight line over the width; its
KV is a power of the width, a little below 1 where steps repeat. Widths 4 and 64 give both, width 16
is predicted. Time is the engine process's CPU time on one thread, which other work on the machine
hardly changes; widths take turns.
"""

from __future__ import annotations

import math
from dataclasses import replace
from statistics import mean
from typing import Any

from loadtest.capacity import Search
from loadtest.searches import Method, embedded, grow, items_of
from loadtest.served import process_seconds
from search.outcome import Outcome
from search.spec import SearchSpec
from search.tree import combined_digest

NARROW, JUDGED, WIDE = 4, 16, 64
TASK = "countdown"


def line(narrow: float, wide: float, at: int) -> float:
    """The value at width ``at`` on the straight line through those at NARROW and WIDE."""
    return narrow + (wide - narrow) * (at - NARROW) / (WIDE - NARROW)


def fitted(narrow: float, wide: float, depth: float, step: float, prompt: float) -> Search:
    """The search whose ``kv_tokens`` are those measured at the narrow and at the wide width."""
    spread = math.log((wide - prompt) / (narrow - prompt)) / math.log(WIDE / NARROW)
    rounds = (wide - prompt) / (step * WIDE**spread)
    kept_share = (rounds - 1) / (depth - 1)
    return Search(WIDE, depth, step, prompt, kept_share, spread)


async def check(quick: bool) -> list[dict[str, Any]]:
    """A row per width: means over questions, and what widths 4 and 64 predict for it."""
    methods = {
        width: Method("rebase", SearchSpec(policy="rebase", width=width))
        for width in (NARROW, JUDGED, WIDE)
    }
    items = items_of(TASK, "dev", 4 if quick else 16, 0)
    seconds: dict[int, list[float]] = {width: [] for width in methods}
    outcomes: dict[int, list[Outcome]] = {width: [] for width in methods}
    async with embedded(threads=1) as engine:
        assert engine.pid is not None, "a started engine has a process"
        await grow(engine, items_of(TASK, "dev", 99, 0)[-1], methods[WIDE])  # warms up
        for item in items:
            for width, method in methods.items():
                before = process_seconds(engine.pid)
                outcomes[width].append(await grow(engine, item, method))
                seconds[width].append(process_seconds(engine.pid) - before)
    return _rows(seconds, outcomes)


def _rows(
    seconds: dict[int, list[float]], outcomes: dict[int, list[Outcome]]
) -> list[dict[str, Any]]:
    time = {width: mean(samples) for width, samples in seconds.items()}
    stats = {width: [outcome.stats for outcome in many] for width, many in outcomes.items()}
    kv = {width: mean(s.kv_tokens_peak for s in many) for width, many in stats.items()}
    depth = mean(s.depth for s in stats[WIDE])
    step = mean(s.generated_tokens / s.nodes for s in stats[WIDE])
    prompt = mean(s.prompt_tokens for s in stats[WIDE])
    wide = fitted(kv[NARROW], kv[WIDE], depth, step, prompt)
    rows = []
    for width in outcomes:
        predicted_kv = replace(wide, width=width).kv_tokens
        predicted_time = line(time[NARROW], time[WIDE], width)
        rows.append(
            {
                "width": width,
                "kv_tokens": kv[width],
                "kv_tokens_predicted": predicted_kv,
                "kv_ratio": predicted_kv / kv[width],
                "cpu_seconds": time[width],
                "cpu_seconds_predicted": predicted_time,
                "time_ratio": predicted_time / time[width],
                "kept": wide.kept,
                "spread": wide.spread,
                "n": len(outcomes[width]),
                "tree_digest": combined_digest(outcome.digest for outcome in outcomes[width]),
            }
        )
    return rows
