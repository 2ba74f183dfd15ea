"""How much does a reward on SGLang depend on what is scored beside it, and on what was cached?

Rewards enter a tree rounded to four digits: one that lies beside a boundary may enter as its
neighbour, and the tree has another digest then. Searches are grown on real servers of the bundled
models on this machine's CPU, eight at once, and each of their paths is scored again in other ways.
A row is a way:

- ``searched``: as the searches had it, beside others and below what was cached;
- ``again``: alone, nothing cached, once more;
- ``below``: alone, its parent cached;
- ``beside``: all of its search in one list, nothing cached.

Each is compared with the same path alone and nothing cached: ``most_apart`` and ``mean_apart`` of
rewards as they come, ``turned`` of them once rounded, ``most_units`` of the last digit between the
two of those, and ``searches_turned`` that have any.

With ``--float64`` the reward model computes in float64.

    python -m loadtest.sglang_rewards [--searches 40] [--width 8] [--float64] [--json]
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from loadtest.on_sglang import (
    Device,
    engine_on,
    forget,
    policy_server,
    reward_server,
    started,
    to_its_end,
)
from loadtest.options import BenchmarkParser, at_least
from loadtest.report import publish, say
from loadtest.searches import Item, Method, grow, items_of, side_by_side
from runtime.engine_wrapper import EngineWrapper
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.sglang_engine import SglangEngine
from search.engine import Trajectory
from search.spec import SearchSpec
from search.tree import UNITS, round_reward

WAYS = ("searched", "again", "below", "beside")
COLUMNS = (
    *("way", "searches", "rewards", "most_apart", "mean_apart", "turned", "most_units"),
    "searches_turned",
)
TASK = "game24"
POOL_TOKENS = 20_000
AT_ONCE = 8
AS_IN_CONFIG = ("--dtype", "auto")
Steps = tuple[tuple[int, ...], ...]
Rewards = Mapping[tuple[int, Steps], float]
"""Rewards by the number of a search and the steps of a path."""


class ScoredSearch(EngineWrapper):
    """A search's paths in the order scored, and their unrounded rewards."""

    def __init__(self, engine: SglangEngine, number: int) -> None:
        super().__init__(engine)
        self.number = number
        self.rewards: dict[Steps, float] = {}
        self._paths: dict[Steps, Trajectory] = {}
        self._about: tuple[tuple[int, ...], str] = (), ""

    async def score(
        self, tree: str, prompt: tuple[int, ...], question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """Score as the engine does, and keep the paths and rewards."""
        self._about = prompt, question
        rewards = await super().score(tree, prompt, question, trajectories)
        for trajectory, reward in zip(trajectories, rewards, strict=True):
            self._paths[trajectory.steps] = trajectory
            self.rewards[trajectory.steps] = reward
        return rewards

    async def score_again(self, paths: Sequence[Steps], name: str) -> dict[Steps, float]:
        """Score the same paths in one call, as a search that has scored nothing yet."""
        trajectories = [self._paths[path] for path in paths]
        try:
            rewards = await super().score(name, *self._about, trajectories)
        finally:
            await self.release(name)
        return dict(zip(paths, rewards, strict=True))


async def scored_in(
    way: str, searches: Sequence[ScoredSearch], reward: LaunchedServer
) -> dict[tuple[int, Steps], float]:
    """Score all paths again in a way; ``alone`` is the one that the others are compared with."""
    rewards: dict[tuple[int, Steps], float] = {}
    for search in searches:
        paths = list(search.rewards)
        lists = [paths] if way == "beside" else [[path] for path in paths]
        for place, batch in enumerate(lists):
            if way != "below" or not place:
                await forget([reward])
            again_rewards = await search.score_again(batch, f"{way}/{search.number}-{place}")
            rewards |= {(search.number, path): value for path, value in again_rewards.items()}
    return rewards


def compared(way: str, rewards: Rewards, alone: Rewards) -> dict[str, Any]:
    """A way's row."""
    apart = [abs(rewards[path] - alone[path]) for path in alone]
    units = {
        path: round(UNITS * abs(round_reward(rewards[path]) - round_reward(alone[path])))
        for path in alone
    }
    turned = [path for path, many in units.items() if many]
    return {
        "way": way,
        "searches": len({number for number, _ in alone}),
        "rewards": len(alone),
        "most_apart": max(apart),
        "mean_apart": sum(apart) / len(apart),
        "turned": len(turned),
        "most_units": max(units.values()),
        "searches_turned": len({number for number, _ in turned}),
    }


def in_float64(checkpoint: Path, folder: Path) -> Path:
    """A copy of a checkpoint below ``folder`` whose configuration has SGLang compute in float64,
    which no option of SGLang's does."""
    copy = folder / checkpoint.name
    shutil.copytree(checkpoint, copy)
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"dtype": "float64"}))
    return copy


async def measure(
    python: Path,
    items: Sequence[Item],
    width: int,
    *,
    device: Device = "cpu",
    args: Sequence[str] = (),
    double: Path | None = None,
) -> list[dict[str, Any]]:
    """A row for each way; ``args``: more of SGLang's options for both servers; ``double``: where to
    put a reward model that is computed in float64."""
    policy = policy_server(python, "arborkv", POOL_TOKENS, args=args, device=device)
    reward = reward_server(python, POOL_TOKENS, args=args, device=device)
    if double is not None:
        prm, dtype_args = in_float64(Path(reward.options.model), double), (*args, *AS_IN_CONFIG)
        reward = reward_server(python, POOL_TOKENS, model=prm, args=dtype_args, device=device)
    method = Method("one", SearchSpec(policy="rebase", width=width))
    async with started([policy, reward]), engine_on([policy], [reward]) as engine:

        async def score_search(numbered: tuple[int, Item]) -> ScoredSearch:
            number, item = numbered
            search = ScoredSearch(engine, number)
            await grow(search, item, method)
            return search

        searches = await side_by_side(score_search, enumerate(items), AT_ONCE)
        alone = await scored_in("alone", searches, reward)
        searched = {(s.number, path): r for s in searches for path, r in s.rewards.items()}
        rows = [compared("searched", searched, alone)]
        for way in WAYS[1:]:
            rows.append(compared(way, await scored_in(way, searches, reward), alone))
            say(f"{rows[-1]}")
    return rows


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser("sglang_rewards", __doc__, "searches", "python")
    parser.set_defaults(searches=40)
    parser.add_argument("--width", type=at_least(1), default=8)
    parser.add_argument("--float64", action="store_true", help="the reward model computes in it")
    options = parser.parse_args()
    items = items_of(TASK, "test", options.searches, 0)
    with tempfile.TemporaryDirectory() as folder:
        double = Path(folder) if options.float64 else None
        rows = to_its_end(measure(options.python, items, options.width, double=double))
    publish({"rows": rows}, options.json, "Rewards on SGLang", COLUMNS)


if __name__ == "__main__":
    main()
