"""A disk that is full under the file of trees."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx

from loadtest.hostile.history import Asked, StageHistory, checked
from loadtest.hostile.searches import in_company
from loadtest.served import Served, values

FULL = "/dev/full"
"""Takes what is written to it as a disk does that has no room left."""


def full_disk(kept: StageHistory, count: int) -> list[Asked]:
    """So many searches whose trees cannot be written."""
    if history := kept.read():
        return history
    lines: list[str] = []
    with Served("--trees", FULL, heard=lines.append) as served:
        found = asyncio.run(in_company(served.url, range(count), 4))
        text = httpx.get(f"{served.url}/metrics").text
    kept.note(
        counted=sum(values(text, "hedgerow_unwritten_trees_total")),
        told=sum("trees are lost" in line for line in lines),
    )
    kept.add(found)
    return found


def checked_disk(history: list[Asked], facts: dict[str, Any]) -> dict[str, Any]:
    """Every search has its answer; what is lost is counted, and told once."""
    answered = sum(one.status == httpx.codes.OK for one in history)
    found = checked(history)
    more = {"unanswered": len(history) - answered, "uncounted": answered - facts["counted"]}
    more |= {"not_told_once": facts["told"] != 1}
    return found | {"broken": found["broken"] | {name: n for name, n in more.items() if n}}
