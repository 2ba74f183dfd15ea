"""Kill ``hedgerow serve --launch`` at random moments: what remains, does it start again?"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from contextlib import suppress
from pathlib import Path
from threading import Thread
from typing import Any, Self

from loadtest.report import say

MARK = "KILLED_STARTS"
"""The environment variable by which all processes of a start are found."""
GONE_SECONDS = 10.0
UP_SECONDS = 600.0
"""Seconds for a start to become ready."""
AFTER_SECONDS = 5.0
"""Kills come up to this many seconds after a start is ready."""
MEMORY = "0.5,0.5"
POOL_TOKENS = "20000"
SERVER = """
import json, subprocess, sys, time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
info = {"internal_states": [{"effective_max_running_requests_per_dp": 8}], "context_length": 1024,
        "max_total_num_tokens": 4096, "disable_cuda_graph": True}
class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        body = json.dumps(info).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)
    do_POST = do_GET
    def log_message(self, *_):
        pass
time.sleep(1)
port = int(sys.argv[sys.argv.index("--port") + 1])
ThreadingHTTPServer(("127.0.0.1", port), Answer).serve_forever()
"""
"""The code of a stub of SGLang with two children, one of them outside its process group."""


def python_that(folder: Path, code: str) -> Path:
    """Write a Python executable whose ``sglang.launch_server`` runs ``code``."""
    (folder / "sglang").mkdir()
    (folder / "sglang" / "__init__.py").touch()
    (folder / "sglang" / "launch_server.py").write_text(code)
    python = folder / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH={folder} exec {sys.executable} "$@"\n')
    python.chmod(0o755)
    return python


def marked(mark: str) -> list[int]:
    """The process ids of a start."""
    pids = []
    for folder in Path("/proc").iterdir():
        with suppress(OSError):
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes():
                pids.append(int(folder.name))
    return pids


class Start:
    """One start of the command, by the mark of its processes; killed when its context ends."""

    def __init__(self, python: Path) -> None:
        self.mark = uuid.uuid4().hex
        self.ready = asyncio.Event()
        self.gone_seconds = 0.0
        """Seconds from its end until all of its processes were gone, GONE_SECONDS at most."""
        self.left = 0
        """Processes that were still there then."""
        environment = {
            "HEDGEROW_ENGINE": "sglang",
            "HEDGEROW_LAUNCH": "true",
            "HEDGEROW_LAUNCH_PYTHON": str(python),
            "HEDGEROW_LAUNCH_DEVICE": "cpu",
            "HEDGEROW_LAUNCH_MEMORY": MEMORY,
            "HEDGEROW_KV_TOKENS": POOL_TOKENS,
            "HEDGEROW_PRM_KV_TOKENS": POOL_TOKENS,
            MARK: self.mark,
        }
        self._process = subprocess.Popen(
            [sys.executable, "-m", "cli", "serve", "--port", "0"],
            env=os.environ | environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._loop = asyncio.get_running_loop()
        self._reader = Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self._process.stderr is not None, "it is a pipe"
        with self._process.stderr as lines:
            for line in lines:
                if "ready: serving" in line:
                    self._loop.call_soon_threadsafe(self.ready.set)

    async def ready_within(self, seconds: float) -> bool:
        """Wait until it serves, ``seconds`` at most; returns whether it does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.ready.wait()
        return self.ready.is_set()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Kill it, and count what remains of it."""
        self._process.kill()
        self._process.wait()
        start = time.monotonic()
        while marked(self.mark) and time.monotonic() - start < GONE_SECONDS:
            await asyncio.sleep(0.05)
        self.gone_seconds = time.monotonic() - start
        self.left = _end(self.mark)


async def killed_starts(python: Path | None, folder: Path, kills: int) -> dict[str, Any]:
    """Kill starts at random moments of the time that a whole start took, or shortly after it; then
    start once more. Without ``python``, that of SGLang's environment, a stub is started."""
    python, dice = python or python_that(folder, SERVER), random.Random(0)
    run_start = time.monotonic()
    async with Start(python) as start:
        failed = int(not await start.ready_within(UP_SECONDS))
        start_seconds = time.monotonic() - run_start
    slowest, survivors = start.gone_seconds, start.left
    say(f"a start takes {start_seconds:.0f} s")
    for number in range(1, kills):
        async with Start(python) as start:
            if await start.ready_within(dice.uniform(0.0, start_seconds)):
                await asyncio.sleep(dice.uniform(0.0, AFTER_SECONDS))
        slowest = max(slowest, start.gone_seconds)
        survivors += start.left
        say(f"killed {number + 1} of {kills}, the slowest gone after {slowest:.1f} s")
    async with Start(python) as last:
        failed += int(not await last.ready_within(UP_SECONDS))
    return {
        "row": "hedgerow",
        "kills": kills,
        "left": survivors + last.left,
        "failed": failed,
        "gone_seconds": round(slowest, 1),
        "seconds": round(time.monotonic() - run_start, 1),
    }


def _end(mark: str) -> int:
    """Kill the processes that remain of a start; return how many."""
    pids = marked(mark)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return len(pids)
