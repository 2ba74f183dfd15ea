"""The capacity model, worked by hand, and what it must never say."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace

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
    decode_seconds,
    prefill_seconds,
    row,
)
from loadtest.capacity_check import JUDGED, NARROW, WIDE, fitted, line
from server.gpus import Gpu

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
    """What made the numbers is found again."""
    true = Search(WIDE, depth=3, step=10, prompt=100, kept=0.5, spread=0.9)
    narrow = replace(true, width=NARROW).kv_tokens
    found = fitted(narrow, true.kv_tokens, 3, 10, 100)
    assert (found.kept, found.spread) == (pytest.approx(0.5), pytest.approx(0.9))
    assert found.kv_tokens == pytest.approx(true.kv_tokens)


def test_the_roofline_by_hand() -> None:
    """2 MB of weights at 100 MB/s are 20 ms; 200 MFLOP for 100 rows at 1 GFLOP/s are 0.2 s."""
    assert decode_seconds(BOX, TINY, rows=1, path=0) == pytest.approx(0.02)
    assert decode_seconds(BOX, TINY, rows=100, path=0) == pytest.approx(0.2)
    assert prefill_seconds(BOX, TINY, tokens=1) == pytest.approx(0.02)
    assert prefill_seconds(BOX, TINY, tokens=1000) == pytest.approx(2.0)


def test_a_replica_by_hand() -> None:
    """90 MB less 4 MB of weights hold so many searches, which share every pass."""
    one = ReplicaModel(BOX, TINY, TINY, SMALL)
    assert one.kv_bytes == 180 * 64
    assert one.kv_bytes_mean == 140 * 64
    assert one.kv_room == pytest.approx(86e6 / 64)
    assert one.room == int(86e6 // (180 * 64))
    rows = 4 * 25
    passes = 10 * 2e6 * rows / 1e9 + 2e6 * rows * 10 / 1e9
    assert one.seconds(25) == pytest.approx(3 * passes / EFFICIENCY)
    assert one.drawing(25) == pytest.approx(one.scoring(25)) == pytest.approx(one.seconds(25) / 2)
    assert one.rate(25) == pytest.approx(25 / one.seconds(25))


def test_users_by_hand() -> None:
    """3600 asks an hour are one a second; time and KV follow by Little's law."""
    one = ReplicaModel(BOX, TINY, TINY, SMALL)
    found = row(600, 6.0, one)
    assert found["arrivals_per_second"] == 600 * 6 / HOUR == 1
    assert found["replicas"] * one.rate(one.room) * BUSY >= 1
    shared = company(one.rate, one.room, 1 / found["replicas"])
    assert (found["searches_at_once"], found["busy"]) == (shared.at_once, shared.busy)
    each = found["replicas"] * (shared.at_once + shared.waiting)
    assert found["seconds"] == pytest.approx(each)
    assert found["seconds"] > one.seconds(1)
    assert found["expected_kv_tokens"] == pytest.approx(
        found["replicas"] * shared.at_once * SMALL.kv_tokens_mean
    )


def test_one_user_has_the_machine_alone() -> None:
    """Nearly the time of one, on a replica that is nearly idle."""
    one = ReplicaModel(
        GPUS["h100"], MODELS["qwen2.5-1.5b"], MODELS["qwen2.5-7b"], Search(64, 10, 60, 300)
    )
    found = row(1, 6.0, one)
    assert found["replicas"] == 1
    assert found["seconds"] == pytest.approx(one.seconds(1), rel=0.01)
    assert found["busy"] == pytest.approx(one.seconds(1) * 6 / HOUR, rel=0.01)


def test_what_does_not_fit_is_refused_with_both_sizes() -> None:
    """Two large models leave too little of a small card."""
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
    """Replicas and KV grow with users; what is planned is never more than what is served."""
    search = Search(width, depth, step, prompt=200)
    one = ReplicaModel(GPUS[gpu], MODELS["qwen2.5-1.5b"], MODELS["qwen2.5-7b"], search)
    few, many = (row(n, 6.0, one) for n in (users, 2 * users))
    assert few["replicas"] <= many["replicas"]
    assert few["expected_kv_tokens"] <= many["expected_kv_tokens"] * (1 + 1e-9)
    assert few["searches_at_once"] <= few["most_at_once"]


def test_the_judged_width_lies_on_the_line() -> None:
    """Between the two that make it."""
    assert NARROW < JUDGED < WIDE
    assert line(1.0, 61.0, JUDGED) == 13.0


def test_the_command_prints_one_document() -> None:
    """Rows for the users asked for."""
    command = [sys.executable, "-m", "loadtest.capacity", "--json", "--users", "1,1000"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert [found["users"] for found in json.loads(done.stdout)["rows"]] == [1, 1000]
