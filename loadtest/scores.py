"""What does it gain to ask for many scores in one call?

`python -m loadtest.scores [--quick] [--json]`. The bundled reward model behind a server in a
process of its own. Sixty-four replies, eight to each of eight questions, drawn beforehand by
searches, are scored in one call of ``/v1/score``, in 64 calls at once and in 64 one after the
other: in turns, and every time with questions that no cache has seen. ``scores`` are rewards of
steps a second; ``over_one_call`` is the median over the turns of that side's time over the one
call's.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Awaitable, Callable, Sequence
from itertools import count
from typing import Any

import httpx

from loadtest.report import publish, say
from loadtest.served import Served
from loadtest.turns import in_turns
from models.tasks import TASKS
from search.tree_json import from_json

TASK, QUESTIONS, REPLIES = "game24", 8, 8
ONE, AT_ONCE, IN_TURN = "one call of 64", "64 calls at once", "64 calls in turn"
COLUMNS = ("side", "replies", "steps", "seconds", "scores", "over_one_call")
DEADLINE = 600.0

Item = dict[str, Any]


async def replies_of(client: httpx.AsyncClient, question: str) -> list[list[str]]:
    """The steps of replies that a search has drawn."""
    search = {"policy": "self_consistency", "width": REPLIES, "seed": 1}
    asked = await client.post("/v1/search", json={"question": question, "search": search})
    tree = from_json(asked.raise_for_status().json()["tree"])
    return [[step.text for step in tree.chain(node.id)] for node in tree.finished()]


async def score(client: httpx.AsyncClient, items: Sequence[Item]) -> int:
    """Have them scored in one call; how many rewards came."""
    asked = await client.post("/v1/score", json={"items": items})
    return sum(len(row["rewards"]) for row in asked.raise_for_status().json()["data"])


def sides(
    client: httpx.AsyncClient, fresh: Callable[[], list[Item]]
) -> dict[str, Callable[[], Awaitable[object]]]:
    """The ways to ask, each for items that are ``fresh``."""

    async def at_once() -> None:
        await asyncio.gather(*(score(client, [item]) for item in fresh()))

    async def in_turn() -> None:
        for item in fresh():
            await score(client, [item])

    return {ONE: lambda: score(client, fresh()), AT_ONCE: at_once, IN_TURN: in_turn}


async def measure(url: str, repeats: int) -> list[dict[str, Any]]:
    """A row a side."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=QUESTIONS * REPLIES)
    async with httpx.AsyncClient(base_url=url, timeout=DEADLINE, limits=limits) as client:
        questions = TASKS[TASK].questions("dev", QUESTIONS)
        drawn = {question: await replies_of(client, question) for question in questions}
        numbers = count()

        def fresh() -> list[Item]:
            number = next(numbers)  # before everything else: nothing of it is cached
            return [
                {"question": f"{number}. {question}", "steps": steps}
                for question, replies in drawn.items()
                for steps in replies
            ]

        steps = sum(len(item["steps"]) for item in fresh())
        calls = sides(client, fresh)
        await in_turns(calls, 1)  # warms up
        times = await in_turns(calls, repeats)
    return [
        {
            "side": side,
            "replies": QUESTIONS * REPLIES,
            "steps": steps,
            "seconds": times.median(side),
            "scores": steps / times.median(side),
            "over_one_call": times.ratio(side, ONE),
        }
        for side in calls
    ]


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.scores", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="two turns")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args()
    say("a server starts")
    with Served() as served:
        rows = asyncio.run(measure(served.url, 2 if options.quick else 9))
    publish({"rows": rows}, options.json, "rewards of steps a second", COLUMNS)


if __name__ == "__main__":
    main()
