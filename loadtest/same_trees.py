"""Same seed, same tree: does any switch of the engine change a tree?

`python -m loadtest.same_trees [--limit 100] [--policy ets,mcts] [--json]`. Every policy's searches
of dev questions of all tasks, eight at once, on an engine with everything switched off, then with
each switch and with all of them. A row is a switch and a policy: how many of the trees are the
same, and what the switch did, which shows that it was at work (an order leaves no trace but time).
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from loadtest.options import BenchmarkParser, listed
from loadtest.report import publish, say, say_row
from loadtest.searches import Engines, Item, Method, dev_questions, grow_all
from models.bundled import SPRIG_FOLDER
from runtime.embedded.embedded_engine import EmbeddedEngine
from search.counters import Counters
from search.outcome import Outcome
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from search.tree import combined_digest

WIDTH = 4
STEP_TOKENS = 64
"""Steps are short, so that a pool may be small."""
AT_ONCE = 8
POOL = 1_000
"""KV tokens of a small pool: some paths and their next steps, not eight trees."""
SHARED = 1_600
"""KV tokens of each model, where they are shared anew: more than a sequence may have."""
COLUMNS = ("change", "policy", "n", "same", "evidence", "amount")

OFF: Mapping[str, object] = {
    "kv_policy": "lru",
    "batch_limit": 64,
    "threads": 1,
    "dedup": False,
    "strict": True,
}
_DRAFT: Mapping[str, object] = {"draft": "scheduled", "draft_model": SPRIG_FOLDER / "draft"}
_AHEAD: Mapping[str, object] = {"speculate": True, "lookahead": True, "batch_limit": 16}
_SMALL: Mapping[str, object] = {"kv_policy": "arborkv", "kv_tokens": POOL}
_SPLIT: Mapping[str, object] = {
    "kv_split": "roofline",
    "kv_tokens": SHARED,
    "prm_kv_tokens": SHARED,
}


@dataclass(frozen=True, slots=True)
class Change:
    """EngineOptions beside ``OFF``; ``evidence``: what of a tree's cost, or of the engine's
    counters, shows them at work."""

    options: Mapping[str, object]
    evidence: str


CHANGES: Mapping[str, Change] = {
    "dedup": Change({"dedup": True}, "deduplicated_tokens"),
    "a small pool, by age": Change({"kv_tokens": POOL}, "rehydrated_tokens"),
    "a small pool, by worth": Change(_SMALL, "rehydrated_tokens"),
    "early work": Change(_AHEAD, "speculated_used"),
    "a split by roofline": Change(_SPLIT, "decoded_tokens"),
    "random order": Change({"order": "random", "batch_limit": 4}, "decoded_tokens"),
    "drafts, serial": Change({**_DRAFT, "draft": "serial"}, "accepted_tokens"),
    "drafts, scheduled": Change({**_DRAFT, "dedup": True}, "accepted_tokens"),
    "drafts of two candidates": Change(
        {**_DRAFT, "draft_tokens": 3, "k_config": (2, 2, 1)}, "accepted_tokens"
    ),
    "everything": Change(
        {**_DRAFT, **_AHEAD, **_SMALL, **_SPLIT, "dedup": True, "threads": 2}, "accepted_tokens"
    ),
}


def spec_of(policy: str) -> SearchSpec:
    """A policy's searches."""
    return SearchSpec(policy=policy, width=WIDTH, max_step_tokens=STEP_TOKENS)  # type: ignore[arg-type]


def row_of(
    change: str,
    evidence: str,
    policy: str,
    reference: Sequence[str],
    outcomes: Sequence[Outcome],
    counted: int = 0,
) -> dict[str, Any]:
    """How many digests are those of the reference. ``counted``: evidence that is no tree's."""
    digests = [outcome.digest for outcome in outcomes]
    return {
        "change": change,
        "policy": policy,
        "n": len(digests),
        "same": sum(a == b for a, b in zip(digests, reference, strict=True)),
        "evidence": evidence,
        "amount": counted + sum(getattr(o.stats.engine, evidence, 0) for o in outcomes),
        "tree_digest": combined_digest(digests),
    }


async def measure(
    policies: Sequence[str], changes: Mapping[str, Change], limit: int
) -> dict[str, Any]:
    """The document: ``rows``, and whether all trees are the ``same``."""
    items = [Item(*pair, seed) for seed, pair in enumerate(dev_questions(limit))]
    methods = [Method(policy, spec_of(policy)) for policy in policies]
    reference: dict[str, list[str]] = {}
    async with Engines(**OFF) as engine:
        for method in methods:
            grown = await grow_all(engine, items, method, AT_ONCE)
            reference[method.name] = [outcome.digest for outcome in grown]
            say(f"everything off, {method.name}: {len(set(reference[method.name]))} trees")
    rows: list[dict[str, Any]] = []
    for name, change in changes.items():
        async with Engines(**{**OFF, **change.options}) as engine:
            for method in methods:
                before = await _counted(engine, change.evidence)
                grown = await grow_all(engine, items, method, AT_ONCE)
                counted = await _counted(engine, change.evidence) - before
                known = reference[method.name]
                rows.append(row_of(name, change.evidence, method.name, known, grown, counted))
                say_row(rows[-1], COLUMNS)
    return {"rows": rows, "same": all(row["same"] == row["n"] for row in rows)}


async def _counted(engine: EmbeddedEngine, evidence: str) -> int:
    """The engine's counter of that name, unless a tree's cost has it."""
    usage = await engine.usage()
    return 0 if hasattr(Counters(), evidence) else getattr(usage.totals, evidence)


def main() -> None:
    """Print a table, or one JSON document with ``--json``; ends with 1 if a tree differs."""
    parser = BenchmarkParser("same_trees", __doc__, "limit")
    parser.set_defaults(questions=100)
    parser.add_argument("--policy", type=listed(str, POLICIES), help="by commas; all without")
    parser.add_argument("--change", choices=CHANGES, help="one switch; all without")
    options = parser.parse_args()
    changes = {options.change: CHANGES[options.change]} if options.change else CHANGES
    document = asyncio.run(measure(options.policy or list(POLICIES), changes, options.questions))
    publish(document, options.json, "Same seed, same tree", COLUMNS)
    raise SystemExit(0 if document["same"] else 1)


if __name__ == "__main__":
    main()
