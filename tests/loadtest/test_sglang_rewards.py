"""`python -m loadtest.sglang_rewards`: scoring paths again, and how far apart rewards are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, cast

import pytest

from loadtest.searches import SPRIG, Method, grow, unlike_items
from loadtest.sglang_rewards import ScoredSearch, compared, in_float64
from search.spec import SearchSpec
from search.tree import round_reward
from tests.search.scripted_engine import ScriptedEngine


def test_a_row_by_hand() -> None:
    """Of three rewards of two searches one is the same, one changes in its last rounded digit, and
    one differs by less than rounding shows."""
    alone = {(0, ((1,),)): 0.5, (0, ((2,),)): 0.30004, (1, ((1,),)): 0.70001}
    beside = {(0, ((1,),)): 0.5, (0, ((2,),)): 0.30006, (1, ((1,),)): 0.70004}
    row = compared("beside", beside, alone)
    assert (row["searches"], row["rewards"]) == (2, 3)
    assert row["most_apart"] == pytest.approx(3e-5)
    assert row["mean_apart"] == pytest.approx(5e-5 / 3)
    assert (row["turned"], row["most_units"], row["searches_turned"]) == (1, 1, 1)


async def test_paths_are_scored_again_as_they_were() -> None:
    """Paths are scored again, with equal rewards, as a tree of another name that is released."""
    scripted = ScriptedEngine()
    search = ScoredSearch(cast(Any, scripted), 0)
    spec = SearchSpec(policy="rebase", width=4)
    (item,) = unlike_items("game24", 1)
    outcome = await grow(search, item, Method("one", spec))
    rewards = {node.reward for node in outcome.tree.nodes[1:]}
    assert {round_reward(reward) for reward in search.rewards.values()} == rewards
    assert await search.score_again(list(search.rewards), "again") == search.rewards
    assert "again" in scripted.released


def test_a_checkpoint_in_float64(tmp_path: Path) -> None:
    """The copy differs only in its dtype; the original checkpoint is not changed."""
    assert SPRIG.prm is not None
    source = Path(SPRIG.prm)
    before = (source / "config.json").read_text()
    copy = in_float64(source, tmp_path)
    config = json.loads((copy / "config.json").read_text())
    assert config == json.loads(before) | {"dtype": "float64"}
    assert {path.name for path in copy.iterdir()} == {path.name for path in source.iterdir()}
    assert (source / "config.json").read_text() == before
