"""A server in a process of its own, its metrics and memory, and Locust's users who ask it."""

from __future__ import annotations

import atexit
import json
import math
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from threading import Thread, current_thread, main_thread
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

STOP_SECONDS = 70
"""Seconds for requests under way when a server or users are to stop."""
PACED_SECONDS = 10.0
"""Seconds between two requests of a user who asks at a rate: longer than an answer takes."""
REFUSED = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
LOCUSTFILE = Path(__file__).with_name("locust_scenarios.py")


class Served:
    """The bundled models behind ``hedgerow serve`` on a free port; use it as a context manager."""

    def __init__(
        self, *args: str, on_line: Callable[[str], object] | None = None, **settings: object
    ) -> None:
        """``args``: of the command; ``settings``: by name; ``on_line`` gets each line of its log.

        Raises RuntimeError if the server does not start. It ends with this program, also if that is
        ended by SIGTERM (``exit_on_sigterm``).
        """
        exit_on_sigterm()
        environment = {f"HEDGEROW_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli", "serve", "--port", "0", *args],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | environment,
        )
        atexit.register(self.process.kill)
        self.url = self._ready_url(on_line)
        self._reader = Thread(target=self._read, args=(on_line,), daemon=True)  # or the pipe fills
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop it and wait until it has ended, with all requests that are under way."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_SECONDS)
        atexit.unregister(self.process.kill)
        self._reader.join()

    def _ready_url(self, on_line: Callable[[str], object] | None) -> str:
        assert self.process.stderr is not None
        lines = []
        for line in self.process.stderr:
            lines.append(line)
            if on_line is not None:
                on_line(line)
            match = re.search(r"ready: serving \S+ on (http://[^\s\"]+)", line)
            if match is not None:
                return match[1]
        raise RuntimeError("the server did not start:\n" + "".join(lines))

    def _read(self, on_line: Callable[[str], object] | None) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                if on_line is not None:
                    on_line(line)

    @property
    def engine(self) -> int:
        """The engine's process: the server's child with the most memory."""
        return max(children(self.process.pid), key=anonymous_bytes)

    def open_files(self) -> int:
        """File handles of the server and its children, connections included."""
        pids = [self.process.pid, *children(self.process.pid)]
        return sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)

    def memory(self) -> int:
        """Bytes that the server's processes hold and that no file backs, swapped ones included."""
        return sum(map(anonymous_bytes, [self.process.pid, *children(self.process.pid)]))


def exit_on_sigterm() -> None:
    """Have SIGTERM raise SystemExit, unless it is handled already, so that what this program has
    started ends with it. Does nothing in a thread, which may not set signals."""
    handled = signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL
    if current_thread() is main_thread() and not handled:
        signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))


def children(pid: int) -> list[int]:
    """The processes that a process's main thread has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def process_seconds(pid: int) -> float:
    """Processor time of a process, ended threads included."""
    user, system = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]
    return (int(user) + int(system)) / os.sysconf("SC_CLK_TCK")


def anonymous_bytes(pid: int) -> int:
    """RssAnon and VmSwap of a process; 0 if it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0
    return 1024 * sum(
        int(kilobytes) for kilobytes in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+)", status)
    )


def samples(text: str) -> Iterator[Sample]:
    """Every sample of Prometheus's text format."""
    for family in text_string_to_metric_families(text):
        yield from family.samples


def values(text: str, name: str, **labels: str) -> list[float]:
    """The values of the samples with this name and at least these labels."""
    return [
        sample.value
        for sample in samples(text)
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def load_records(
    url: str, kinds: Sequence[str], seconds: float, *, users: int = 0, rate: float = 0.0
) -> list[dict[str, Any]]:
    """Run Locust's users of these kinds (`loadtest/locust_scenarios.py`) for ``seconds``: a record
    per request, ``ended`` in seconds from the first one's start.

    There are ``users`` of them, or enough to ask ``rate`` times a second while others wait.
    Raises RuntimeError if Locust fails.
    """
    users = math.ceil(rate * PACED_SECONDS) or users
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "records.jsonl"
        path.touch()
        period = users / rate if rate else 0.0
        environment = {"LOADTEST_RECORDS": str(path), "LOADTEST_PERIOD": str(period)}
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"]
        command += ["--host", url, "--users", str(users), "--spawn-rate", str(users)]
        command += ["--run-time", f"{seconds:g}s", "--stop-timeout", str(STOP_SECONDS)]
        command += ["--exit-code-on-error", "0", "--only-summary", *kinds]
        process = subprocess.run(
            command, env=os.environ | environment, capture_output=True, text=True, check=False
        )
        if process.returncode:
            raise RuntimeError(f"locust failed:\n{process.stderr}")
        records = [json.loads(line) for line in path.read_text().splitlines()]
    start = min((record["ended"] - record["ms"] / 1000 for record in records), default=0.0)
    return [record | {"ended": record["ended"] - start} for record in records]


def load_row(records: Sequence[Mapping[str, Any]], deadline: float) -> dict[str, Any]:
    """A row of requests. ``goodput_rps``: answers a second within ``deadline`` seconds; later
    ones and 504s are ``late``; quantiles are of the honest key's answers; ``lost``: with none of
    the endings that the server intends."""
    elapsed = max((record["ended"] for record in records), default=0.0)
    answered = [record for record in records if record["status"] == httpx.codes.OK]
    honest = sorted(record["ms"] for record in answered if record["key"] == "honest")
    good = sum(record["ms"] <= 1000 * deadline for record in answered)
    refused = sum(record["status"] in REFUSED for record in records)
    timeouts = sum(record["status"] == httpx.codes.GATEWAY_TIMEOUT for record in records)
    return {
        "requests": len(records),
        "offered_rps": round(len(records) / elapsed, 2) if elapsed else 0.0,
        "goodput_rps": round(good / elapsed, 2) if elapsed else 0.0,
        **{f"p{n}_ms": round(quantile(honest, n / 100)) for n in (50, 95, 99)},
        "refused": refused,
        "late": len(answered) - good + timeouts,
        "lost": len(records) - len(answered) - refused - timeouts,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted numbers, one of them; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
