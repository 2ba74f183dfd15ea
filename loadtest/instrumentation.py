"""What does watching a search cost? Events, traces and metrics, alone and together.

`python -m loadtest.instrumentation [--quick] [--json]`, on the searches of `loadtest.goodput`. Each
is grown once on the engine, timed, and what the engine answered is noted. The same search is then
grown again and again on those answers alone, with and without what watches it, in turns: the
difference, in processor time, is what watching costs. Its share of the search's own time may be
``LIMIT`` at most. What the engine counts in its own process is always on and is part of both.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import (
    BatchSpanProcessor,
    SpanExporter,
    SpanExportResult,
)

from loadtest.goodput import GoodputCell
from loadtest.in_process import InProcess, ModelsInProcess
from loadtest.paired import bootstrap95
from loadtest.report import publish, say, shown
from loadtest.searches import Item, Method, grow, items_of
from models.bundled import SPRIG_FOLDER
from runtime.embedded.options import EngineOptions
from runtime.engine_wrapper import EngineWrapper
from search.controller import search
from search.counters import Counters
from search.engine import Branch, Hint, KvMoved, Sampling, Step, Trajectory, Usage
from search.events import Event
from search.outcome import Outcome
from server.prometheus_metrics import Metrics
from server.streams import event as framed
from server.tracing import Tracing

LIMIT = 0.01
TASK = "wordproblem"
SIDES = ("events", "traces", "metrics", "all")
AMPLE = 65_536
TIMES = 5
"""Searches a block, of each side."""
CLOCK = time.process_time
COLUMNS = ("policy", "beams", "seconds", "side", "watching_seconds", "overhead", "overhead_ci95")


class Noted(EngineWrapper):
    """An engine whose answers are noted, in order. ``moved``: those of ``kv_moved``."""

    def __init__(self, engine: InProcess) -> None:
        super().__init__(engine)
        self.answers: list[Any] = []
        self.moved: list[KvMoved | None] = []

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """As the engine does."""
        return self._note(await super().expand(tree, branches, sampling))

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """As the engine does."""
        return self._note(await super().score(tree, prompt, question, trajectories))

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """As the engine does."""
        return self._note(await super().embed(tree, prompt, trajectories))

    def kv_moved(self, tree: str) -> KvMoved | None:
        """As the engine does."""
        self.moved.append(super().kv_moved(tree))
        return self.moved[-1]

    async def release(self, tree: str) -> Counters:
        """As the engine does."""
        return self._note(await super().release(tree))

    def _note(self, answer: Any) -> Any:
        self.answers.append(answer)
        return answer


class Told(EngineWrapper):
    """An engine that answers as it did, at once."""

    def __init__(self, noted: Noted, usage: Usage) -> None:
        super().__init__(noted)
        self._answers: Iterator[Any] = iter(noted.answers)
        self._moves = iter(noted.moved)
        self._used = usage

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """What was drawn."""
        return next(self._answers)

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """The rewards."""
        return next(self._answers)

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """The vectors."""
        return next(self._answers)

    def hint(self, tree: str, hint: Hint) -> None:
        """Nothing is kept here."""

    def kv_moved(self, tree: str) -> KvMoved | None:
        """What was told."""
        return next(self._moves)

    async def release(self, tree: str) -> Counters:
        """The cost."""
        return next(self._answers)

    async def usage(self) -> Usage:
        """As it was."""
        return self._used


class Encoded(SpanExporter):
    """Writes spans as they would be sent, and sends them nowhere."""

    def __init__(self) -> None:
        self.spans = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Count and encode them."""
        self.spans += len(spans)
        encode_spans(spans).SerializeToString()
        return SpanExportResult.SUCCESS


class WatchedSearch:
    """A search on a recorded engine, and what watches it. ``seconds``: its own on the engine."""

    def __init__(
        self, models: ModelsInProcess, method: Method, item: Item, noted: Noted, usage: Usage
    ) -> None:
        self._models, self._method, self._item = models, method, item
        self._noted, self._usage = noted, usage
        self.events = self.spans = 0
        self.seconds = 0.0
        self._digest = ""

    @classmethod
    async def record(cls, models: ModelsInProcess, cell: GoodputCell, item: Item) -> WatchedSearch:
        """Grow it on the engine."""
        engine = InProcess(models, kv_tokens=AMPLE, prm_kv_tokens=AMPLE)
        noted = Noted(engine)
        found = cls(models, Method(cell.policy, cell.spec), item, noted, await engine.usage())
        start = CLOCK()
        outcome = await found._grow(noted, listen=lambda event: None)
        found.seconds, found._digest = CLOCK() - start, outcome.digest
        return found

    async def again(self, side: str | None, times: int) -> float:
        """Seconds a search, of so many, watched by a side or by nothing."""
        metrics, encoded = Metrics(), Encoded()
        traces = Tracing(BatchSpanProcessor(encoded), "sprig", "")
        run = traces.search if side in ("traces", "all") else search
        numbers = count()

        def frame(event: Event) -> None:
            framed(event.to_dict(), event.name, next(numbers))

        listen = frame if side in ("events", "all") else None
        digests = set()
        start = CLOCK()
        for _ in range(times):
            outcome = await self._grow(Told(self._noted, self._usage), listen=listen, run=run)
            digests.add(outcome.digest)
            if side in ("metrics", "all"):
                metrics.count_search(outcome)
        if side in ("metrics", "all"):
            metrics.text()
        await traces.close()
        took = CLOCK() - start
        if digests != {self._digest}:
            raise RuntimeError(f"{self._method.name}: watched by {side} it is another tree")
        if side == "all":
            self.events, self.spans = next(numbers) // times, encoded.spans // times
        return took / times

    async def _grow(self, engine: EngineWrapper, **watching: Any) -> Outcome:
        return await grow(
            engine, self._models.text, self._item, self._method, clock=CLOCK, **watching
        )


async def measure(
    models: ModelsInProcess, cells: Sequence[GoodputCell], questions: int, blocks: int, times: int
) -> list[dict[str, Any]]:
    """A row a cell and side. Every block grows ``times`` searches of each side, in turns."""
    rows = []
    for cell in cells:
        found = []
        for item in items_of(cell.task, "test", questions, 0):
            await WatchedSearch.record(models, cell, item)  # warms up
            found.append(await WatchedSearch.record(models, cell, item))
            await _block(found[-1], 1, backwards=False)  # what is done once is not watching
        gc.collect()
        gc.freeze()  # as the server does once it is ready
        shares: dict[str, list[float]] = {side: [] for side in SIDES}
        for block in range(blocks):
            for watched in found:
                for side, share in (await _block(watched, times, block % 2 == 1)).items():
                    shares[side].append(share)
        seconds = statistics.fmean(watched.seconds for watched in found)
        for side, of in shares.items():
            overhead = statistics.fmean(of)
            rows.append(
                {
                    "policy": cell.policy,
                    "task": cell.task,
                    "beams": cell.width,
                    "n": questions,
                    "seconds": seconds,
                    "side": side,
                    "watching_seconds": overhead * seconds,
                    "overhead": overhead,
                    "overhead_ci95": bootstrap95(of),
                    "within": overhead <= LIMIT,
                    "events": statistics.fmean(watched.events for watched in found),
                    "spans": statistics.fmean(watched.spans for watched in found),
                }
            )
            say("  ".join(f"{name} {shown(rows[-1][name])}" for name in COLUMNS))
    return rows


async def _block(watched: WatchedSearch, times: int, backwards: bool) -> dict[str, float]:
    """What each side adds to a search, as a share of its own time."""
    order: list[str | None] = [None, *SIDES]
    took = {side: await watched.again(side, times) for side in order[:: -1 if backwards else 1]}
    return {side: (took[side] - took[None]) / watched.seconds for side in SIDES}


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = argparse.ArgumentParser(
        prog="python -m loadtest.instrumentation", description=(__doc__ or "").splitlines()[0]
    )
    parser.add_argument("--quick", action="store_true", help="two widths, one question")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    parser.add_argument(
        "--model", type=Path, default=SPRIG_FOLDER / "policy", help="policy's folder"
    )
    parser.add_argument(
        "--reward-model", type=Path, default=SPRIG_FOLDER / "prm", help="reward model's folder"
    )
    options = parser.parse_args()
    widths, questions, blocks = ((8, 64), 1, 4) if options.quick else ((8, 64, 256), 4, 8)
    cells = [
        GoodputCell("equal", TASK, policy, n, 1.0) for policy in ("beam", "ets") for n in widths
    ]
    models = ModelsInProcess(
        EngineOptions(policy=options.model, prm=options.reward_model, threads=1)
    )
    rows = asyncio.run(measure(models, cells, questions, blocks, TIMES))
    publish({"rows": rows, "limit": LIMIT}, options.json, "what watching costs", COLUMNS)


if __name__ == "__main__":
    main()
