"""`python -m loadtest.same_trees`: what a row says, its switches, a small run."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from loadtest.same_trees import AT_ONCE, CHANGES, OFF, POOL, measure, row_of, spec_of
from runtime.embedded.options import EngineOptions
from search.engine import TreeCost
from search.policies.registry import POLICIES
from tests.loadtest.command import run


def outcome(digest: str, used: int) -> Any:
    """As much of an outcome as a row looks at."""
    return SimpleNamespace(
        digest=digest, stats=SimpleNamespace(engine=TreeCost(speculated_used=used))
    )


def test_a_row_counts_equal_digests_in_place() -> None:
    """One of three is another tree; evidence is summed up."""
    found = row_of(
        "early work",
        "speculated_used",
        "beam",
        ["aa", "bb", "cc"],
        [outcome("aa", 1), outcome("cc", 0), outcome("cc", 4)],
    )
    assert (found["n"], found["same"], found["amount"]) == (3, 2, 5)


def test_every_change_differs_from_what_it_is_compared_with() -> None:
    """Known options, other values than when all is off, and evidence that a tree's cost has."""
    known = EngineOptions.__dataclass_fields__
    for change in CHANGES.values():
        assert change.options.keys() <= known.keys()
        assert any(OFF.get(name) != value for name, value in change.options.items())
        assert hasattr(TreeCost(), change.evidence)
    assert {spec_of(policy).policy for policy in POLICIES} == set(POLICIES)
    assert AT_ONCE * spec_of("rebase").width * 40 > POOL, "a small pool is too small for all"


def test_an_unknown_policy_is_refused_by_name() -> None:
    """Before an engine is started; argparse's way."""
    done = run("same_trees", "--policy", "greedy")
    assert (done.returncode, done.stdout) == (2, "")
    assert "--policy: greedy: known are best_of_n" in done.stderr


@pytest.mark.slow
def test_a_small_run_in_real_engines() -> None:
    """Everything on at once: equal trees, and drafts were at work."""
    changes = {name: CHANGES[name] for name in ("everything", "a split by roofline")}
    document = asyncio.run(measure(["rebase"], changes, 4))
    assert document["same"]
    for name, row in zip(changes, document["rows"], strict=True):
        assert (row["change"], row["policy"], row["n"], row["same"]) == (name, "rebase", 4, 4)
        assert row["amount"] > 0
