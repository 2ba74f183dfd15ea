"""Which KV does SGLang read again, by replay, with several searches in a small pool?

Searches are recorded in the embedded engine, whose memory is ample, and their requests are served
again by SGLang's own cache and scheduling without a model (`loadtest.sglang_replay`): by age in
SGLang's default order of the queue and with no round held back (``lru_again``), and as Hedgerow
launches servers, with our plug-in, common prefixes first and rounds that wait for room
(``plugin_again``); ``same_queue_again``: by age in the plug-in's order, rounds held back as well.
``bound_again``: what the best order would have read again of the requests as the plug-in's server
served them; ``lru_bound``: as the other one did. ``passes`` of a server until all is drawn,
and ``held_passes`` for which rounds waited, all rounds' added up. A pool that fits all is the last
of each policy: there ``free_passes`` are those with no round held back.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

import hedgerow_sglang
import kvpolicy
import search
from cli.kept_lines import KeptLines
from hedgerow_sglang.plugin_protocol import NAME, Note, custom_params
from loadtest.configs import CONFIG_L, by_levels, scaled
from loadtest.kept import code_of
from loadtest.report import say
from loadtest.searches import Method, embedded, grow, items_of
from runtime.engine_wrapper import EngineWrapper
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.launched_server import STUBS
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.replica import Replica
from runtime.sglang.step_request import forked_prefixes
from search.engine import Branch, Engine, Hint, Sampling, Step
from search.spec import SearchSpec
from search.tree import Finish

Tokens = tuple[int, ...]


def plugged_server() -> Replica:
    """A server with our plug-in, to which nothing is sent."""
    server = Replica("http://nowhere", ServerTimes(connect=1, answer=1, probe=1, stall=30))
    server.plugged = True
    return server


@dataclass(slots=True)
class RecordedSearch:
    """One search's rounds so far, as the engine for SGLang would ask for them.

    Shared prefixes that may not be cached are read first, then a round's steps are drawn in the
    order of their prefixes, and the first request of a round brings the hint. The steps are those
    that the recorded engine drew.
    """

    tree: str
    server: Replica = field(default_factory=plugged_server)
    rounds: list[dict[str, Any]] = field(default_factory=list)
    _notes: PluginNotes = field(init=False)
    _fresh: set[Tokens] = field(default_factory=set)
    _prompt: int = 1

    def __post_init__(self) -> None:
        self._notes = PluginNotes(self.tree)

    def hint(self, hint: Hint) -> None:
        """Note the hint of the next round."""
        self._notes.take(hint)

    def round(self, branches: Sequence[Branch], steps: Sequence[Step]) -> None:
        """Record a round that was drawn."""
        self._prompt = min(len(branch.tokens) for branch in branches)
        forks = forked_prefixes((branch.tokens for branch in branches), self._fresh)
        reads = [self._request(path, (), 0, None) for path in forks]
        pairs = sorted(zip(branches, steps, strict=True), key=lambda pair: pair[0].tokens)
        draws = [self._request(b.tokens, s.tokens, b.limit, b.step) for b, s in pairs]
        self._fresh = {
            (*branch.tokens, *step.tokens)
            for branch, step in pairs
            if step.finish is not Finish.END
        }
        self.rounds.append({"reads": reads, "draws": draws})

    def document(self) -> dict[str, Any]:
        """The search as a replay reads it."""
        over = custom_params(Note(self.tree, self._prompt, over=(self.tree,)))[NAME]
        return {"tree": self.tree, "rounds": self.rounds, "over": over}

    def _request(
        self, prefix: Tokens, step: Tokens, limit: int, about: tuple[int, int] | None
    ) -> list[Any]:
        note = self._notes.on(self.server, self._prompt, about)["custom_params"][NAME]
        return [prefix, step, limit, note]


class RecordingEngine(EngineWrapper):
    """An engine whose searches are recorded, by tree."""

    def __init__(self, engine: Engine) -> None:
        super().__init__(engine)
        self.searches: dict[str, RecordedSearch] = {}

    def hint(self, tree: str, hint: Hint) -> None:
        """Give the engine the hint, and record it."""
        super().hint(tree, hint)
        self._of(tree).hint(hint)

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw as the engine does, and record the round."""
        steps = await super().expand(tree, branches, sampling)
        if branches:
            self._of(tree).round(branches, steps)
        return steps

    def _of(self, tree: str) -> RecordedSearch:
        if tree not in self.searches:
            self.searches[tree] = RecordedSearch(tree)
        return self.searches[tree]


TASK = "blocksworld"
POLICIES = ("ets", "rebase", "best_first")
SEARCHES = (1, 2, 4, 8)
POOLS = (330, 350, 525)
AMPLE_TOKENS = 65_536
ROOT = Path(__file__).parents[1]
STOCK = {"evicts": False, "queue": "fcfs", "gated": False}
SAME_QUEUE = {"evicts": False, "queue": "dfs-weight", "gated": True}
OURS = {"evicts": True, "queue": "dfs-weight", "gated": True}
FREE = {"evicts": True, "queue": "dfs-weight", "gated": False}
LINE_BYTES = 1 << 20

Mode = Mapping[str, Any]
Done = dict[str, Any]


def spec_of(policy: str) -> SearchSpec:
    """ArborKV's scaling test, one leaf a round, for a search that goes back; else width 64."""
    if policy == "best_first":
        return scaled(CONFIG_L, TASK, parallel=1)
    return by_levels(policy, TASK)


def cells(*, quick: bool) -> list[tuple[int, int]]:
    """The cells: searches at once, and tokens of the pool."""
    searches, pools = (SEARCHES[::2], POOLS[:1]) if quick else (SEARCHES, POOLS)
    most = searches[-1], AMPLE_TOKENS
    return [*((many, pool) for many in searches for pool in pools), most]


def modes(searches: int, pool: int) -> list[Mode]:
    """The ways to serve a cell."""
    ways = (OURS, FREE) if pool == AMPLE_TOKENS else (STOCK, SAME_QUEUE, OURS)
    return [{"searches": searches, "pool": pool} | way for way in ways]


def measured(policy: str, searches: int, pool: int, done: Mapping[str, Done]) -> dict[str, Any]:
    """A cell's row; ``done``: the replay's row for each of its modes, by ``key``."""
    runs = [done[key(mode)] for mode in modes(searches, pool)]
    ours = runs[0] if pool == AMPLE_TOKENS else runs[2]
    row = {
        "policy": policy,
        "width": spec_of(policy).width,
        "searches": searches,
        "pool": pool,
        "plugin_again": ours["again"],
        "bound_again": ours["bound"],
        "drawn": ours["drawn"],
        "held_passes": ours["held_passes"],
        "passes": ours["passes"],
    }
    if pool == AMPLE_TOKENS:
        return row | {"free_passes": runs[1]["passes"]}
    stock, same = runs[0], runs[1]
    return row | {
        "lru_again": stock["again"],
        "lru_bound": stock["bound"],
        "lru_passes": stock["passes"],
        "same_queue_again": same["again"],
    }


def key(mode: Mode) -> str:
    """A mode's name in a file."""
    return json.dumps(mode, sort_keys=True)


async def recorded(policy: str, searches: int) -> list[dict[str, Any]]:
    """Record the rounds of ``searches`` searches in the embedded engine."""
    method = Method("one", spec_of(policy))
    ample: dict[str, Any] = {"threads": 1, "kv_tokens": AMPLE_TOKENS, "embedder": "lexical"}
    async with embedded(kv_policy="full", **ample) as engine:
        watched = RecordingEngine(engine)
        items = items_of(TASK, "dev", searches, 0)
        await asyncio.gather(*(grow(watched, item, method) for item in items))
    return [watched.searches[tree].document() for tree in watched.searches]


async def served(
    python: Path, searches: Sequence[Mapping[str, Any]], cell_modes: Sequence[Mode]
) -> AsyncIterator[tuple[Mode, Done]]:
    """Replay each mode; yield it and its row. Raises RuntimeError with the replay's errors."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "recording.json"
        path.write_text(json.dumps(searches))
        paths = os.pathsep.join(map(str, (STUBS, ROOT)))
        errors = Path(folder) / "errors"
        with errors.open("w") as log:
            process = await asyncio.create_subprocess_exec(
                *(str(python), "-m", "loadtest.sglang_replay", str(path)),
                env=os.environ | {"PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1"},
                stdin=PIPE,
                stdout=PIPE,
                stderr=log,
                limit=LINE_BYTES,
            )
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(list(cell_modes)).encode())
            process.stdin.close()
            for mode in cell_modes:
                line = await process.stdout.readline()
                if not line:
                    raise RuntimeError(f"replay of {key(mode)}: {errors.read_text()[-2000:]}")
                yield mode, json.loads(line)
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()


async def grid(python: Path, *, quick: bool, keep: Path | None = None) -> list[dict[str, Any]]:
    """All rows; replays that are kept in the file ``keep`` are not run again."""
    provenance = code_of(search, kvpolicy, hedgerow_sglang)
    rows = []
    for policy in POLICIES:
        lines = KeptLines(keep, f"{policy} {provenance}", TypeAdapter(dict[str, Any]))
        all_modes = [mode for cell in cells(quick=quick) for mode in modes(*cell)]
        done = {key(mode): run for mode in all_modes if (run := lines.get(key(mode)))}
        missing = [mode for mode in all_modes if key(mode) not in done]
        if missing:
            searches = await recorded(policy, max(mode["searches"] for mode in missing))
            async for mode, run in served(python, searches, missing):
                lines.put(key(mode), run)
                done[key(mode)] = run
                say(f"{policy} {key(mode)}: {run['again']} again")
        rows += [measured(policy, *cell, done) for cell in cells(quick=quick)]
    return rows
