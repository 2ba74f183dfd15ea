"""The file of trees: a line for each tree; if it cannot be written, no answer is lost."""

from __future__ import annotations

import asyncio
import json
import logging
import os
from pathlib import Path
from typing import Any

import pytest

from server.app import create_app
from server.service import create_service
from server.settings import Settings
from server.tree_log import MOST_WAITING, TreeLog
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText, client_over, question

SEARCH = {"question": "a", "search": {"width": 2}}
CHAT = {"model": "sprig", "messages": question(), "search": {"width": 2}}


async def test_a_full_disk_costs_no_answer(caplog: pytest.LogCaptureFixture) -> None:
    """Searches, streams, searched chats and background searches are answered and end as usual; each
    loss is counted, logged once, and the file is closed without an error."""
    with TreeLog(Path("/dev/full")) as trees:
        service = create_service(Settings(), ScriptedEngine(), PlainText(), trees=trees)
        async with client_over(create_app(service)) as http:
            plain = await http.post("/v1/search", json=SEARCH)
            assert plain.status_code == 200
            stream = await http.post("/v1/search", json=SEARCH | {"stream": True})
            assert "event: done" in stream.text
            assert (await http.post("/v1/chat/completions", json=CHAT)).status_code == 200
            continuation = await http.post("/v1/search", json=SEARCH | {"background": True})
            events = await http.get(f"/v1/search/{continuation.json()['id']}/events")
            assert "event: done" in events.text
            for answer in plain, continuation:
                document = await http.get(f"/v1/search/{answer.json()['id']}")
                assert document.json()["status"] == "done"
    assert service.metrics.registry.get_sample_value("hedgerow_unwritten_trees_total") == 4
    logs = [r for r in caplog.records if r.name == "hedgerow.trees" and r.levelno == logging.ERROR]
    assert len(logs) == 1


async def test_a_pipe_that_nobody_reads_holds_no_answer_up(tmp_path: Path) -> None:
    """A line is written once somebody reads; meanwhile others wait beside the event loop, and what
    exceeds the buffer is lost and reported once."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDWR)
    lost_numbers: list[int] = []
    with TreeLog(pipe) as trees:
        for number in range(3):
            document = {"tree": number, "more": "x" * 100_000}
            await trees.write_beside(document, lambda number=number: lost_numbers.append(number))
        large = {"tree": 3, "more": "x" * MOST_WAITING}
        await trees.write_beside(large, lambda: lost_numbers.append(3))
        assert lost_numbers == [3]
        content = b""
        while content.count(b"\n") < 3:
            content += await asyncio.to_thread(os.read, reader, 1 << 16)
    assert [json.loads(line)["tree"] for line in content.splitlines()] == [0, 1, 2]
    os.close(reader)


class Disk:
    """A file that takes ``room`` bytes and no more, until it gets room again."""

    name = "trees.jsonl"

    def __init__(self, room: int) -> None:
        self.room = room
        self.bytes = b""

    def write(self, data: Any) -> int:
        """Write what fits, as a file without a buffer."""
        if not self.room:
            raise OSError(28, "No space left on device")
        fitting = bytes(data[: self.room])
        self.bytes += fitting
        self.room -= len(fitting)
        return len(fitting)


def test_half_a_line_garbles_no_other() -> None:
    """Once there is room again, the next tree begins a line of its own."""
    trees, disk = TreeLog(None), Disk(room=12)
    trees._file = disk  # type: ignore[assignment]
    assert not trees.write({"tree": "lost" * 9})
    assert not trees.write({"tree": "too"})
    disk.room = 999
    assert trees.write({"tree": 1})
    assert trees.write({"tree": 2})
    assert disk.bytes.count(b"\n") == 3
    assert [json.loads(line) for line in disk.bytes.splitlines()[1:]] == [{"tree": 1}, {"tree": 2}]
