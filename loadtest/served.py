"""A server in a process of its own, what it says of itself, and Locust's users who ask it."""

from __future__ import annotations

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
from threading import Thread
from typing import Any, Self

import httpx
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

STOP_SECONDS = 70
"""For what is under way when a server or users are to stop."""
PACED_SECONDS = 10.0
"""Between two requests of a user who asks at a rate: longer than an answer takes."""
REFUSED = (httpx.codes.TOO_MANY_REQUESTS, httpx.codes.SERVICE_UNAVAILABLE)
LOCUSTFILE = Path(__file__).with_name("locust_scenarios.py")


class Served:
    """The bundled models behind ``hedgerow serve`` on a free port; use it as a context manager."""

    def __init__(
        self, *args: str, heard: Callable[[str], object] | None = None, **settings: object
    ) -> None:
        """``args`` of the command, ``settings`` by their names; ``heard`` gets what it logs.

        Raises RuntimeError if the server does not start.
        """
        given = {f"HEDGEROW_{name.upper()}": str(value) for name, value in settings.items()}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "cli", "serve", "--port", "0", *args],
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | given,
        )
        assert self.process.stderr is not None
        said = []
        for line in self.process.stderr:
            said.append(line)
            if heard is not None:
                heard(line)
            found = re.search(r"ready: serving \S+ on (http://[^\s\"]+)", line)
            if found is not None:
                self.url = found[1]
                break
        else:
            raise RuntimeError("the server did not start:\n" + "".join(said))
        self._reader = Thread(target=self._read, args=(heard,))  # or its pipe fills up
        self._reader.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """End it, once what is under way has ended. Waits."""
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(STOP_SECONDS)
        self._reader.join()

    def _read(self, heard: Callable[[str], object] | None) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as lines:
            for line in lines:
                if heard is not None:
                    heard(line)

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
    return 1024 * sum(int(found) for found in re.findall(r"(?:RssAnon|VmSwap):\s+(\d+)", status))


def samples(text: str) -> Iterator[Sample]:
    """Every sample of Prometheus's text format."""
    for family in text_string_to_metric_families(text):
        yield from family.samples


def values(text: str, name: str, **labels: str) -> list[float]:
    """The samples of this name that bear these labels, whatever others they bear."""
    return [
        sample.value
        for sample in samples(text)
        if sample.name == name and labels.items() <= sample.labels.items()
    ]


def asked_by(
    url: str, kinds: Sequence[str], seconds: float, *, users: int = 0, rate: float = 0.0
) -> list[dict[str, Any]]:
    """What Locust's users of these kinds (`loadtest/locust_scenarios.py`) ask for so long: a record
    a request, ``ended`` in seconds from the first one's start.

    So many ``users``; or as many as ask ``rate`` times a second in all, whoever waits meanwhile.
    Raises RuntimeError if Locust fails.
    """
    users = math.ceil(rate * PACED_SECONDS) or users
    with tempfile.TemporaryDirectory() as folder:
        records = Path(folder) / "records.jsonl"
        records.touch()
        period = users / rate if rate else 0.0
        given = {"LOADTEST_RECORDS": str(records), "LOADTEST_PERIOD": str(period)}
        command = [sys.executable, "-m", "locust", "-f", str(LOCUSTFILE), "--headless"]
        command += ["--host", url, "--users", str(users), "--spawn-rate", str(users)]
        command += ["--run-time", f"{seconds:g}s", "--stop-timeout", str(STOP_SECONDS)]
        command += ["--exit-code-on-error", "0", "--only-summary", *kinds]
        done = subprocess.run(
            command, env=os.environ | given, capture_output=True, text=True, check=False
        )
        if done.returncode:
            raise RuntimeError(f"locust failed:\n{done.stderr}")
        found = [json.loads(line) for line in records.read_text().splitlines()]
    began = min((one["ended"] - one["ms"] / 1000 for one in found), default=0.0)
    return [one | {"ended": one["ended"] - began} for one in found]


def load_row(found: Sequence[Mapping[str, Any]], deadline: float) -> dict[str, Any]:
    """What became of requests. ``goodput_rps``: answers a second within ``deadline`` seconds, the
    others are ``late``; quantiles are of the honest key's answers; ``lost``: without any end that
    the server means."""
    took = max((one["ended"] for one in found), default=0.0)
    answered = [one for one in found if one["status"] == httpx.codes.OK]
    honest = sorted(one["ms"] for one in answered if one["key"] == "honest")
    good = sum(one["ms"] <= 1000 * deadline for one in answered)
    refused = sum(one["status"] in REFUSED for one in found)
    ended = sum(one["status"] == httpx.codes.GATEWAY_TIMEOUT for one in found)
    return {
        "requests": len(found),
        "offered_rps": round(len(found) / took, 2) if took else 0.0,
        "goodput_rps": round(good / took, 2) if took else 0.0,
        **{f"p{n}_ms": round(quantile(honest, n / 100)) for n in (50, 95, 99)},
        "refused": refused,
        "late": len(answered) - good + ended,
        "lost": len(found) - len(answered) - refused - ended,
    }


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted numbers, one of them; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
