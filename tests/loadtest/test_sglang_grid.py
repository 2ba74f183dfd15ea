"""The grid of `python -m loadtest.sglang`: recordings, and rows from replaying them."""

from __future__ import annotations

from typing import Any

import pytest

from hedgerow_sglang.plugin_protocol import parse_note
from loadtest.on_sglang import PYTHON
from loadtest.searches import REBASE_8, Method, grow_all, unlike_items
from loadtest.sglang_grid import (
    AMPLE_TOKENS,
    FREE,
    OURS,
    STOCK,
    RecordingEngine,
    key,
    measured,
    modes,
    served,
)
from search.outcome import Outcome
from tests.search.scripted_engine import ScriptedEngine


async def recording(searches: int) -> tuple[list[Outcome], list[dict[str, Any]]]:
    """Run searches without a model; their outcomes and recorded rounds."""
    engine = RecordingEngine(ScriptedEngine())
    items = unlike_items("game24", searches)
    outcomes = await grow_all(engine, items, Method("one", REBASE_8), searches)
    return outcomes, [search.document() for search in engine.searches.values()]


async def test_a_recording_has_every_step_once() -> None:
    """Steps have their parent's path; only the first request of a round has a hint; a prefix that
    several draws share and that was not just drawn is read first."""
    (outcome,), (recorded,) = await recording(1)
    draws = [draw for round_ in recorded["rounds"] for draw in round_["draws"]]
    tree = outcome.tree
    assert len(draws) == len(tree) - 1
    for prefix, step, limit, note in draws:
        parsed = parse_note(note)
        assert parsed.node is not None
        assert parsed.parent is not None
        assert tuple(prefix) == tree.tokens(parsed.parent)
        assert tuple(step) == tree[parsed.node].tokens
        assert len(step) <= limit
    for round_ in recorded["rounds"]:
        first, *others = [parse_note(draw[3]) for draw in (*round_["reads"], *round_["draws"])]
        assert first.active
        assert not any(note.hints for note in others)
    assert tuple(recorded["rounds"][0]["reads"][0][0]) == tree.prompt
    assert parse_note(recorded["over"]).over == (recorded["tree"],)


def test_a_row_says_whose_numbers_are_whose() -> None:
    """A row combines three runs of a cell, or two where the pool fits all."""
    cells = {
        key(mode): {"again": at, "bound": 10 * at, "drawn": 7, "passes": 100 + at, "held_passes": 5}
        for at, mode in enumerate([*modes(4, 330), *modes(8, AMPLE_TOKENS)])
    }
    row = measured("ets", 4, 330, cells)
    assert (row["lru_again"], row["same_queue_again"], row["plugin_again"]) == (0, 1, 2)
    assert (row["lru_bound"], row["bound_again"], row["held_passes"]) == (0, 20, 5)
    row = measured("ets", 8, AMPLE_TOKENS, cells)
    assert (row["plugin_again"], row["passes"], row["free_passes"]) == (3, 103, 104)


@pytest.mark.sglang
@pytest.mark.slow
@pytest.mark.timeout(1200)
async def test_what_is_served_again() -> None:
    """In a small pool SGLang's caches read no less again than the bound. In a pool that fits all
    they read nothing again, and no round is held back: passes are as without holding back."""
    outcomes, searches = await recording(3)
    longest = max(len(o.tree.tokens(node.id)) for o in outcomes for node in o.tree.nodes)
    tight = 2 * longest + max(draw[2] for draw in searches[0]["rounds"][0]["draws"])
    settings = [
        {"searches": 3, "pool": pool} | way
        for pool in (tight, AMPLE_TOKENS)
        for way in (STOCK, FREE, OURS)
    ]
    cells = [cell async for _, cell in served(PYTHON, searches, settings)]
    assert {cell["drawn"] for cell in cells} == {cells[0]["drawn"]}
    assert all(0 <= cell["bound"] <= cell["again"] for cell in cells)
    stock, free, ours = cells[3:]
    assert stock["again"] == free["again"] == ours["again"] == 0
    assert ours["held_passes"] == 0
    assert ours["passes"] == free["passes"]
