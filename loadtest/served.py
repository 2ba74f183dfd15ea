"""A server in a process of its own, what it says of itself, and load that is not its own."""

from __future__ import annotations

import asyncio
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from pathlib import Path
from threading import Thread
from types import TracebackType
from typing import Self, TypeVar

from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

STOP_SECONDS = 60
T = TypeVar("T")


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

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
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

    def cpu_seconds(self) -> dict[str, float]:
        """Processor time so far of the ``server``'s process, its ``engine``'s, and this one's."""
        pids = {"server": self.process.pid, "engine": self.engine, "generator": os.getpid()}
        return {name: cpu_seconds(pid) for name, pid in pids.items()}

    def memory(self) -> int:
        """Bytes that the server's processes hold and that no file backs, swapped ones included."""
        return sum(map(anonymous_bytes, [self.process.pid, *children(self.process.pid)]))


def children(pid: int) -> list[int]:
    """The processes that a process's main thread has started."""
    return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


def cpu_seconds(pid: int) -> float:
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


def poisson(rate: float, seconds: float, seed: int = 0) -> list[float]:
    """Times of arrivals within so many seconds, ``rate`` a second on average, ascending.

    Always the same for the same arguments.
    """
    noise, at, times = random.Random(seed), 0.0, []
    while (at := at + noise.expovariate(rate)) < seconds:
        times.append(at)
    return times


async def closed_loop(
    ask: Callable[[], Awaitable[T]], clients: int, seconds: float
) -> tuple[list[T], float]:
    """What so many clients get that ask for so long, one thing after the other each; and the
    seconds until all have it."""
    began, answers = time.perf_counter(), []

    async def client() -> None:
        while time.perf_counter() < began + seconds:
            answers.append(await ask())

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers, time.perf_counter() - began


async def open_loop(
    ask: Callable[[], Awaitable[T]], rate: float, seconds: float, seed: int = 0
) -> tuple[list[T], float]:
    """What those get that come by chance, whoever waits meanwhile; and the seconds until all have
    it. One that is late comes at once."""
    began, asking = time.perf_counter(), []
    for at in poisson(rate, seconds, seed):
        await asyncio.sleep(max(0.0, began + at - time.perf_counter()))
        asking.append(asyncio.ensure_future(ask()))
    return await asyncio.gather(*asking), time.perf_counter() - began


def quantile(ordered: Sequence[float], share: float) -> float:
    """A quantile of sorted numbers, one of them; 0 of none."""
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else 0.0
