"""The capacity model, worked by hand, and properties that it must always have."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.capacity import (
    BUSY,
    EFFICIENCY,
    GPUS,
    HOUR,
    MODELS,
    Model,
    ReplicaModel,
    Search,
    company,
    pass_seconds,
    row,
)
from loadtest.capacity_check import JUDGED, NARROW, WIDE, fitted, line
from server.gpus import Gpu
from tests.loadtest.command import run

TINY = Model(parameters=1e6, layers=2, kv_heads=1, head_dim=4)
SMALL = Search(width=4, depth=3, step=10, prompt=100, kept=0.5, spread=1.0)
BOX = Gpu("box", teraflops=1e-3, bandwidth=0.1, memory=0.1)


def test_kv_by_hand() -> None:
    """Width 4, 3 rounds of 10 tokens, half kept: 100 + 10 * (4 + 0.5 * 4 * 2) = 180 tokens."""
    assert SMALL.kv_tokens == 180
    assert TINY.kv == 2 * 2 * 2 * 1 * 4
    assert replace(SMALL, width=16, spread=0.5).kv_tokens == 180
    assert SMALL.kv_tokens_mean == 100 + 80 / 2


def test_the_fit_goes_through_both_widths() -> None:
    """The fit recovers the parameters that the numbers were computed from."""
    true = Search(WIDE, depth=3, step=10, prompt=100, kept=0.5, spread=0.9)
    narrow = replace(true, width=NARROW).kv_tokens
    fit = fitted(narrow, true.kv_tokens, 3, 10, 100)
    assert (fit.kept, fit.spread) == (pytest.approx(0.5), pytest.approx(0.9))
    assert fit.kv_tokens == pytest.approx(true.kv_tokens)


def test_the_roofline_by_hand() -> None:
    """2 MB of weights at 100 MB/s are 20 ms; 200 MFLOP for 100 rows at 1 GFLOP/s are 0.2 s."""
    assert pass_seconds(BOX, TINY, tokens=1) == pytest.approx(0.02)
    assert pass_seconds(BOX, TINY, tokens=100) == pytest.approx(0.2)
    assert pass_seconds(BOX, TINY, tokens=1000) == pytest.approx(2.0)
    # 100,000 tokens of KV at 32 bytes are 3.2 MB more.
    assert pass_seconds(BOX, TINY, tokens=10, path=10_000) == pytest.approx(0.052)


def test_a_replica_by_hand() -> None:
    """90 MB less 4 MB of weights are the room for searches, which share every pass."""
    replica = ReplicaModel(BOX, TINY, TINY, SMALL)
    assert replica.kv_bytes == 180 * 64
    assert replica.kv_bytes_mean == 140 * 64
    assert replica.kv_room == pytest.approx(86e6 / 64)
    assert replica.room == int(86e6 // (180 * 64))
    rows = 4 * 25
    passes = 10 * 2e6 * rows / 1e9 + 2e6 * rows * 10 / 1e9
    assert replica.seconds(25) == pytest.approx(3 * passes / EFFICIENCY)
    assert (
        replica.drawing(25)
        == pytest.approx(replica.scoring(25))
        == pytest.approx(replica.seconds(25) / 2)
    )
    assert replica.rate(25) == pytest.approx(25 / replica.seconds(25))


@dataclass(frozen=True, slots=True)
class Law:
    """``seconds(n) = fixed + each * n``: ``fixed`` for passes, which all searches share, ``each``
    for the rows of one search.
    """

    fixed: float
    each: float

    def seconds(self, at_once: float) -> float:
        """The seconds of one search while ``at_once`` run."""
        return self.fixed + self.each * at_once

    def rate(self, at_once: float) -> float:
        """The number of searches that end in a second while ``at_once`` run."""
        return at_once / self.seconds(at_once)


def test_sharing_that_gains_nothing_is_a_queue() -> None:
    """At half load of one search a second: one under way on average, busy half of the time."""
    queue = company(lambda _: 1.0, 1, 0.5)
    assert queue.at_once == pytest.approx(0.5)
    assert queue.waiting == pytest.approx(0.5)
    assert queue.busy == pytest.approx(0.5)
    shared = company(lambda _: 1.0, 5, 0.5)
    assert shared.at_once + shared.waiting == pytest.approx(1)
    assert shared.waiting == pytest.approx(0.5**5)


def test_sharing_that_costs_nothing_is_each_alone() -> None:
    """Two a second, one second each: two under way on average, none for e**-2 of the time."""
    queue = company(float, 200, 2)
    assert queue.at_once == pytest.approx(2)
    assert queue.busy == pytest.approx(1 - math.exp(-2))


def test_shared_passes_by_hand() -> None:
    """A search takes 4 s alone, 3 of them shared; at half load 0.5 * 4 / 0.5 are under way."""
    queue = company(Law(fixed=3, each=1).rate, 400, 0.5)
    assert queue.at_once == pytest.approx(4)
    assert queue.waiting == pytest.approx(0, abs=1e-9)
    assert queue.busy == pytest.approx(1 - 0.5**4)


def test_very_many_places_fit_the_arithmetic() -> None:
    """Products of thousands of factors above 1 do not overflow."""
    queue = company(float, 5000, 2000)
    assert queue.at_once == pytest.approx(2000)
    assert queue.busy == pytest.approx(1)


def test_more_than_it_can_do_is_refused() -> None:
    """The error names both rates."""
    with pytest.raises(ValueError, match="2 a second arrive, 1 are the most that end"):
        company(lambda _: 1.0, 4, 2.0)


@given(st.floats(0, 10), st.floats(0.01, 10), st.integers(1, 64), st.floats(0.01, 0.9))
def test_more_arrivals_are_never_less_company(
    fixed: float, each: float, most: int, load: float
) -> None:
    """More arrivals mean more searches at once, and no search is quicker than one alone."""
    law = Law(fixed, each)
    arrivals = load * law.rate(most)
    few, many = (company(law.rate, most, share * arrivals) for share in (0.5, 1.0))
    assert few.at_once <= many.at_once <= most
    assert few.busy <= many.busy <= 1
    assert (few.at_once + few.waiting) / (0.5 * arrivals) >= law.seconds(1) * (1 - 1e-9)


def test_users_by_hand() -> None:
    """3600 searches an hour are one a second; time and KV follow by Little's law."""
    replica = ReplicaModel(BOX, TINY, TINY, SMALL)
    plan = row(600, 6.0, replica)
    assert plan["arrivals_per_second"] == 600 * 6 / HOUR == 1
    assert plan["replicas"] * replica.rate(replica.room) * BUSY >= 1
    shared = company(replica.rate, replica.room, 1 / plan["replicas"])
    assert (plan["searches_at_once"], plan["busy"]) == (shared.at_once, shared.busy)
    each = plan["replicas"] * (shared.at_once + shared.waiting)
    assert plan["seconds"] == pytest.approx(each)
    assert plan["seconds"] > replica.seconds(1)
    assert plan["expected_kv_tokens"] == pytest.approx(
        plan["replicas"] * shared.at_once * SMALL.kv_tokens_mean
    )


def test_one_user_has_the_machine_alone() -> None:
    """A search takes nearly the time of one alone, on a replica that is nearly idle."""
    replica = ReplicaModel(
        GPUS["h100"], MODELS["qwen2.5-1.5b"], MODELS["qwen2.5-7b"], Search(64, 10, 60, 300)
    )
    plan = row(1, 6.0, replica)
    assert plan["replicas"] == 1
    assert plan["seconds"] == pytest.approx(replica.seconds(1), rel=0.01)
    assert plan["busy"] == pytest.approx(replica.seconds(1) * 6 / HOUR, rel=0.01)


def test_what_does_not_fit_is_refused_with_both_sizes() -> None:
    """Two large models leave too little memory on a small GPU for one search."""
    large = MODELS["qwen2.5-7b"]
    with pytest.raises(ValueError, match=r"holds [\d.]+ GB of KV; 0.0 GB are left"):
        _ = ReplicaModel(Gpu("small", 1, 1000, 20), large, large, Search(4, 2, 9, 9)).room


@given(
    st.sampled_from(sorted(GPUS)),
    st.integers(1, 256),
    st.integers(1, 20),
    st.integers(1, 200),
    st.integers(1, 10**6),
)
def test_more_users_never_need_less(
    gpu: str, width: int, depth: int, step: int, users: int
) -> None:
    """Replicas and KV grow with users; searches at once are never more than the places."""
    search = Search(width, depth, step, prompt=200)
    replica = ReplicaModel(GPUS[gpu], MODELS["qwen2.5-1.5b"], MODELS["qwen2.5-7b"], search)
    few, many = (row(n, 6.0, replica) for n in (users, 2 * users))
    assert few["replicas"] <= many["replicas"]
    assert few["expected_kv_tokens"] <= many["expected_kv_tokens"] * (1 + 1e-9)
    assert few["searches_at_once"] <= few["most_at_once"]


def test_the_judged_width_lies_on_the_line() -> None:
    """It lies between the two widths that the line is fitted to."""
    assert NARROW < JUDGED < WIDE
    assert line(1.0, 61.0, JUDGED) == 13.0


def test_the_command_prints_one_document() -> None:
    """It has one row for each requested number of users."""
    process = run("capacity", "--json", "--users", "1,1000")
    assert [plan["users"] for plan in json.loads(process.stdout)["rows"]] == [1, 1000]
