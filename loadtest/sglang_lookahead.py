"""What ``--lookahead`` is worth on SGLang: steps drawn early, scored with the step before or later.

Real servers of the bundled models on this machine's CPU, which let in by priority. Each question is
searched with it and without, in turns, from empty caches; a row is one of the two: ``items`` that
the reward model's server was sent and ``requests`` that they came in, the median ``seconds`` of a
search, ``used`` and ``wasted`` early tokens, and ``different`` searches, whose steps are others
than with it.

    python -m loadtest.sglang_lookahead [--searches 8] [--width 32] [--json]
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import httpx

from loadtest.on_sglang import (
    PYTHON,
    engine_on,
    forget,
    policy_server,
    reward_server,
    started,
    to_its_end,
)
from loadtest.report import publish, say
from loadtest.searches import SPRIG, Method, grow, items_of
from loadtest.sglang_router import steps_of
from runtime.sglang.launched_server import LaunchedServer
from runtime.text import Text
from search.outcome import Outcome
from search.spec import SearchSpec

KEYS = ("lookahead", "searches", "items", "requests", "seconds", "used", "wasted", "different")
POOL_TOKENS = 20_000


@dataclass(slots=True)
class ScoreRequests:
    """What the reward model's server was asked, and the searches that asked it."""

    requests: int = 0
    items: int = 0
    seconds: list[float] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)

    async def look(self, request: httpx.Request) -> None:
        """A request is sent."""
        if request.url.path == "/generate":
            self.requests += 1
            self.items += len(json.loads(request.content)["input_ids"])

    def row(self, lookahead: bool, other: ScoreRequests) -> dict[str, Any]:
        """Beside the searches with it."""
        pairs = zip(self.outcomes, other.outcomes, strict=True)
        return {
            "lookahead": lookahead,
            "searches": len(self.outcomes),
            "items": self.items,
            "requests": self.requests,
            "seconds": statistics.median(self.seconds),
            "used": sum(one.stats.engine.speculated_used for one in self.outcomes),
            "wasted": sum(one.stats.engine.speculated_wasted for one in self.outcomes),
            "different": sum(steps_of(one) != steps_of(two) for one, two in pairs),
        }


async def measure(python: Path, searches: int, width: int) -> list[dict[str, Any]]:
    """All searches in both ways."""
    plain = policy_server(python, "arborkv", POOL_TOKENS)
    policy = LaunchedServer(replace(plain.options, schedules=True))
    servers, text = [policy, reward_server(python, POOL_TOKENS)], Text(SPRIG.policy)
    method = Method("one", SearchSpec(policy="rebase", width=width))
    found = {True: ScoreRequests(), False: ScoreRequests()}
    async with started(servers):
        for place, item in enumerate(items_of("game24", "dev", searches, seed=0)):
            for lookahead in (True, False) if place % 2 else (False, True):
                scored = found[lookahead]
                await forget(servers)
                changes = {"speculate": True, "lookahead": lookahead}
                async with engine_on(servers[:1], servers[1:], **changes) as engine:
                    (reward,) = engine._rewards.replicas
                    reward._client.event_hooks["request"].append(scored.look)
                    begun = time.monotonic()
                    scored.outcomes.append(await grow(engine, text, item, method))
                    scored.seconds.append(time.monotonic() - begun)
            say(f"{found[True].seconds[-1]:.2f} s with it, {found[False].seconds[-1]:.2f} without")
    return [found[lookahead].row(lookahead, found[True]) for lookahead in (True, False)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure, and print a table or a JSON document with ``rows``."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.sglang_lookahead", description=__doc__
    )
    parser.add_argument("--python", type=Path, default=PYTHON)
    parser.add_argument("--searches", type=int, default=8)
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    rows = to_its_end(measure(options.python, options.searches, options.width))
    publish({"rows": rows}, options.json, "Lookahead on SGLang", KEYS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
