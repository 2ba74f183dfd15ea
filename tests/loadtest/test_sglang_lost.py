"""`python -m loadtest.sglang_lost`: rows of lost, cut and different streams, and killed servers."""

from __future__ import annotations

import asyncio
import uuid
from pathlib import Path

import pytest

from loadtest.hostile.killed_servers import StreamEnd
from loadtest.hostile.killed_starts import killed_starts, marked
from loadtest.hostile.sglang_stub import items
from loadtest.sglang_lost import COLUMNS, held, loss_counts, servers_row
from runtime.supervisor import LINUX


def ending(number: int, *tokens: int, digest: str = "d", reward: float = 0.5) -> StreamEnd:
    """The complete stream of a search of one step."""
    end = StreamEnd(number)
    end.hear("expanded", {"parent": 0, "child": 0, "tokens": tokens})
    end.hear("scored", {"node": 1, "reward": reward})
    end.hear("done", {"answer": "24", "tree_digest": digest})
    return end


def test_a_row_by_hand() -> None:
    """Of five searches one is the same, one has another reward and so another digest, one has other
    steps, one ended with an error and one without its last event."""
    calm = [ending(number, 1, 2) for number in range(5)]
    failed, partial = StreamEnd(3), StreamEnd(4, cut=True)
    failed.hear("error", {"error": {"code": "engine_unavailable"}})
    ends = [ending(0, 1, 2), ending(1, 1, 2, digest="e", reward=0.5001), ending(2, 1, 3)]
    row = loss_counts([*ends, failed, partial], calm, 1.0)
    assert (row["searches"], row["lost"], row["cut"]) == (5, 1, 1)
    assert (row["different"], row["other_digests"]) == (1, 1)
    assert (row["rewards"], row["turned"], row["most_apart"]) == (2, 1, 1e-4)
    assert row["errors"] == ["engine_unavailable"]


def test_what_must_hold() -> None:
    """Nothing may be lost, cut, different or left; 250 ms after a deadline are allowed."""
    row = dict.fromkeys(COLUMNS) | {"other_digests": 2, "late_ms": 250.0}
    assert held(row)
    for name, value in (("lost", 1), ("cut", 1), ("different", 1), ("left", 1), ("late_ms", 251)):
        assert not held(row | {name: value})


def test_the_items_of_a_list() -> None:
    """A list request is split into single ones; values that are no lists go into each."""
    request = {"rid": ["a", "b"], "input_ids": [[1], [2, 3]], "stream": True}
    assert items(request) == [
        {"rid": "a", "input_ids": [1], "stream": True},
        {"rid": "b", "input_ids": [2, 3], "stream": True},
    ]


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_servers_killed_under_streams() -> None:
    """The only stub server of each kind is killed: every stream is as without kills."""
    row = await servers_row(stub=True, searches=8, kills=(1, 1))
    assert row["kills"] == 2
    assert held(dict.fromkeys(COLUMNS) | row)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.skipif(not LINUX, reason="reads /proc")
async def test_hedgerow_killed(tmp_path: Path) -> None:
    """Hedgerow is killed twice, the second time at a random moment; every restart succeeds."""
    row = await killed_starts(None, tmp_path, 2)
    assert (row["kills"], row["left"], row["failed"]) == (2, 0, 0)


@pytest.mark.skipif(not LINUX, reason="reads /proc")
async def test_a_run_that_is_cancelled_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cancelled during its first start, it ends what it started."""
    monkeypatch.setattr("loadtest.hostile.killed_starts.MARK", f"MARK_{uuid.uuid4().hex}")
    run = asyncio.create_task(killed_starts(None, tmp_path, 2))
    async with asyncio.timeout(60):
        while not marked(""):
            await asyncio.sleep(0.01)
    run.cancel()
    with pytest.raises(asyncio.CancelledError):
        await run
    assert not marked("")
