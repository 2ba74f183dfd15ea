"""What a small KV pool costs on SGLang: tokens read again under lru, priority and our plug-in.

Real searches on real servers. The pool is a share, by default a quarter, of what full retention of
the same searches holds at its peak; the embedded engine, whose memory is ample, says how much that
is and what the trees are. The policy is drawn by SGLang, each server started with that pool:

- ``lru``: a stock server; what was used longest ago goes first;
- ``priority``: a stock server with ``--radix-eviction-policy priority``, each request's priority
  what its parent is worth to the search (grade (a) of docs/sglang-plugin.md);
- ``arborkv``: our plug-in's radix cache (grade (b)).

What the best order there is would have read again follows from which requests were served when,
which servers do not tell: `loadtest.sglang` has it, of a replay.

All three have the plug-in's seeded sampling, so that they draw the same trees up to rounding. Steps
are scored in the embedded engine: the reward model's KV is not what is compared.

    python -m loadtest.sglang_eviction [--quick] [--json]
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.configs import CONFIG_L, CONFIG_S, STEP_TOKENS, scaled
from loadtest.on_sglang import KV_POLICIES, to_its_end
from loadtest.options import BenchmarkParser, listed
from loadtest.report import publish, say
from loadtest.searches import Engines, Item, Method, grow_all, items_of
from loadtest.sglang_drawing import drawing_in
from search.outcome import Outcome
from search.spec import SearchSpec
from search.tree import combined_digest

COLUMNS = (
    *("policy", "mode", "searches", "pool_tokens", "full_tokens", "recomputed_tokens"),
    *("recomputed_vs_lru", "generated_tokens", "evicted_tokens", "same_answers"),
    *("identical_trees", "seconds"),
)
TASK = "blocksworld"
AT_ONCE = 2
"""Servers at a time: a machine of two cores has no use for more."""
AMPLE_TOKENS = 65_536
POLICIES = ("best_first", "ets")


def spec_of(policy: str, *, quick: bool) -> SearchSpec:
    """ArborKV's scaling test (quick: its budget sweep), one leaf a round, all of its expansions
    spent, for a search that goes back; a level-wise one of width 64 (16)."""
    if policy == "best_first":
        return scaled(CONFIG_S if quick else CONFIG_L, TASK, parallel=1)
    return SearchSpec(policy="ets", width=16 if quick else 64, max_step_tokens=STEP_TOKENS[TASK])


@dataclass(frozen=True, slots=True)
class Reference:
    """The searches with all the memory they want: their trees, and their KV's peaks added up."""

    outcomes: tuple[Outcome, ...]
    full_tokens: int
    pool_tokens: int


async def refer(items: Sequence[Item], spec: SearchSpec, share: float) -> Reference:
    """Search with full retention in the embedded engine, lexical clusters as on SGLang; a pool of
    that share of it holds two of the longest paths."""
    changes: dict[str, Any] = {"threads": 1, "kv_tokens": AMPLE_TOKENS, "embedder": "lexical"}
    async with Engines(kv_policy="full", **changes) as engine:
        outcomes = await grow_all(engine, items, Method("full", spec), len(items))
    longest = max(len(o.tree.tokens(node.id)) for o in outcomes for node in o.tree.nodes)
    full = sum(o.stats.engine.kv_tokens_peak for o in outcomes)
    pool = max(int(share * full), 2 * longest)
    return Reference(tuple(outcomes), full, pool)


async def measure(
    python: Path, mode: str, spec: SearchSpec, items: Sequence[Item], known: Reference
) -> dict[str, Any]:
    """One server with a small pool, all searches at once, and what was read again."""
    method = Method(mode, spec)
    async with drawing_in(python, mode, known.pool_tokens) as engine:
        start = time.monotonic()
        outcomes = await grow_all(engine, items, method, len(items))
        seconds = time.monotonic() - start
        evicted = (await engine.usage()).totals.evicted_tokens
    row = {"policy": spec.policy, "mode": mode, "task": TASK, "pool_tokens": known.pool_tokens}
    row |= compared(outcomes, known) | {"evicted_tokens": evicted, "seconds": round(seconds, 1)}
    say(" ".join(f"{name}={row[name]}" for name in COLUMNS if name in row))
    return row


def compared(outcomes: Sequence[Outcome], known: Reference) -> dict[str, Any]:
    """What searches cost in a small pool, and the share that came out as with ample memory."""
    pairs = list(zip(outcomes, known.outcomes, strict=True))
    return {
        "searches": len(pairs),
        "full_tokens": known.full_tokens,
        "recomputed_tokens": sum(o.stats.engine.rehydrated_tokens for o in outcomes),
        "generated_tokens": sum(o.stats.engine.decoded_tokens for o in outcomes),
        "same_answers": sum(a.answer == b.answer for a, b in pairs) / len(pairs),
        "identical_trees": sum(a.digest == b.digest for a, b in pairs) / len(pairs),
        "tree_digest": combined_digest(outcome.digest for outcome in outcomes),
    }


def against_lru(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, each with its recomputed tokens over those of lru; None where lru has none."""
    lru = {row["policy"]: row["recomputed_tokens"] for row in rows if row["mode"] == "lru"}
    for row in rows:
        base = lru[row["policy"]]
        row["recomputed_vs_lru"] = row["recomputed_tokens"] / base if base else None
    return rows


async def run(
    python: Path, searches: int, share: float, specs: Sequence[SearchSpec]
) -> dict[str, Any]:
    """The whole document."""
    items = items_of(TASK, "dev", searches, 0)
    room = asyncio.Semaphore(AT_ONCE)

    async def one(mode: str, spec: SearchSpec, known: Reference) -> dict[str, Any]:
        async with room:
            return await measure(python, mode, spec, items, known)

    known = [await refer(items, spec, share) for spec in specs]
    asked = [
        one(mode, spec, k) for spec, k in zip(specs, known, strict=True) for mode in KV_POLICIES
    ]
    return {"rows": against_lru(list(await asyncio.gather(*asked))), "pool": share}


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser(
        "sglang_eviction",
        __doc__,
        "python",
        quick="2 small searches, not 4 large ones",
        limit="searches at once",
    )
    parser.add_argument("--policy", type=listed(str, POLICIES), default=POLICIES, help="by commas")
    parser.add_argument("--pool", type=float, default=0.25, help="share of full retention's peak")
    wanted = parser.parse_args()
    searches = wanted.questions or (2 if wanted.quick else 4)
    specs = [spec_of(name, quick=wanted.quick) for name in wanted.policy]
    document = to_its_end(run(wanted.python, searches, wanted.pool, specs))
    publish(document, wanted.json, "KV read again on SGLang", COLUMNS)


if __name__ == "__main__":
    main()
