"""What a search costs on SGLang servers beside what it needs: requests, notes, and waiting.

Real servers of the bundled models on this machine's CPU. A row is one cell; what a cell does not
measure is null in it.

- ``wall_vs_raw``: the wall of a ``self_consistency`` search over that of one raw ``/generate`` list
  with the same prompts, as many tokens per chain, and seeds; ``cpu_vs_raw`` the servers' processor
  time likewise. Caches are emptied before each; the two take turns, three times a question with
  the order changing; the median pair, the least and the most are given.
- ``requests_a_round``: the most requests that a round sends to one server; ``requests``: those of
  all rounds.
- ``note_bytes``: of the busiest round's notes to one server; ``note_ms``: what SGLang's
  tokenizer and scheduler processes take to read a round's, by this one's, the median of nine.
- ``lru_again``, ``plugin_again``: tokens read again with several searches in a small pool, on a
  real server each (`loadtest.sglang_pools`), and, where ``bound_again`` stands beside them, by
  replay without a model (`loadtest.sglang_grid`). ``held_seconds``: for which rounds were held
  back; ``lost`` searches ended with an error, ``different`` ones have another answer or other
  steps; ``wall_vs_lru``: of all searches together over that of the stock server, ``wall_vs_free``:
  in a pool that fits all, over that with no round held back; of ``--repeats`` pairs the median, the
  least and the most; the counts are the first one's, ``lost`` and ``different`` those of all.

    python -m loadtest.sglang [--quick] [--only rounds|pools|grid] [--repeats N]
        [--keep FILE] [--json]
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx

from hedgerow_sglang.plugin_protocol import NAME, parse_note, sampling_seed
from loadtest.on_sglang import (
    PATIENCE_SECONDS,
    PYTHON,
    Device,
    cpu_seconds,
    engine_on,
    forget,
    policy_server,
    reward_server,
    started,
    to_its_end,
)
from loadtest.options import BenchmarkParser
from loadtest.report import publish, say
from loadtest.searches import SPRIG, Item, Method, grow, items_of
from loadtest.sglang_grid import grid, plugged_server
from loadtest.sglang_pools import CountedRounds, pools
from loadtest.turns import in_turns
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.plugin_notes import PluginNotes
from runtime.sglang.sglang_engine import SglangEngine
from search.engine import Engine, Hint
from search.outcome import Outcome
from search.spec import PolicyName, SearchSpec
from search.tree import Tree

KEYS = (
    *("policy", "width", "searches", "pairs", "pool", "lru_again", "plugin_again", "bound_again"),
    *("held_seconds", "wall_vs_raw", "cpu_vs_raw", "requests_a_round", "requests", "note_bytes"),
    *("note_ms", "lost", "different", "wall_vs_lru", "wall_vs_free"),
    *("lru_bound", "same_queue_again", "drawn", "passes", "lru_passes", "free_passes"),
    "held_passes",
)
TASK = "game24"
POOL_TOKENS = 20_000
WIDEST = 1024
NOTED_ROUNDS = 9
PAIRS = 3
"""Pairs a question, of a search and a raw list."""


def row(**measured: Any) -> dict[str, Any]:
    """A row with every key."""
    return dict.fromkeys(KEYS) | measured


@dataclass(frozen=True, slots=True)
class Place:
    """Where servers run, and what they serve. ``fields``: of every search's spec; ``args``: more of
    SGLang's options for the policy's server."""

    python: Path = PYTHON
    device: Device = "cpu"
    policy: str | Path = SPRIG.policy
    prm: str | Path | None = SPRIG.prm
    fields: Mapping[str, Any] = field(default_factory=dict)
    kv_tokens: int = POOL_TOKENS
    args: tuple[str, ...] = ()

    def servers(self) -> list[LaunchedServer]:
        """The policy's and the reward model's servers, not started."""
        python, device, room = self.python, self.device, self.kv_tokens
        return [
            policy_server(
                python, "arborkv", room, model=self.policy, args=self.args, device=device
            ),
            reward_server(python, room, model=self.prm, device=device),
        ]

    def spec(self, policy: PolicyName, width: int) -> SearchSpec:
        """The spec of a search."""
        return SearchSpec(policy=policy, width=width).model_copy(update=dict(self.fields))


@dataclass(frozen=True, slots=True)
class Bench:
    """Running servers, and an engine on them."""

    engine: SglangEngine
    servers: Sequence[LaunchedServer]

    def counted(self) -> AbstractContextManager[CountedRounds]:
        """The engine, with the requests of its rounds counted."""
        return CountedRounds(self.engine).listening()

    async def search(self, item: Item, spec: SearchSpec, engine: Engine | None = None) -> Outcome:
        """Run one search."""
        return await grow(engine or self.engine, item, Method("one", spec))

    async def timed(self, work: Callable[[], Awaitable[Any]]) -> tuple[float, float]:
        """Wall seconds and the servers' processor seconds of ``work`` from empty caches."""
        await forget(self.servers)
        start, cpu_start = time.monotonic(), sum(map(cpu_seconds, self.servers))
        await work()
        return time.monotonic() - start, sum(map(cpu_seconds, self.servers)) - cpu_start


def raw_list(tree: Tree) -> dict[str, Any]:
    """A list request that draws as many tokens as each chain of a tree has, by its own seed."""
    chains = [node.id for node in tree.nodes[1:] if not node.children]
    prompt = list(tree.prompt)
    lengths = [len(tree.tokens(leaf)) - len(prompt) for leaf in chains]
    return {
        "input_ids": [prompt] * len(chains),
        "sampling_params": [
            {"max_new_tokens": most, "ignore_eos": True, "sampling_seed": sampling_seed(seed)}
            for seed, most in enumerate(lengths)
        ],
    }


async def against_raw(
    bench: Bench, items: Sequence[Item], spec: SearchSpec, repeats: int
) -> dict[str, Any]:
    """Compare chains with a raw list, ``repeats`` pairs per item."""
    policy, walls, cpus, most = bench.servers[0], [], [], 0
    async with httpx.AsyncClient(
        base_url=policy.url, timeout=PATIENCE_SECONDS, trust_env=False
    ) as client:
        for item in items:
            with bench.counted() as counted:
                body = raw_list((await bench.search(item, spec, counted)).tree)
            most = max(most, counted.most)
            post = partial(client.post, "/generate", json=body)
            search = partial(bench.search, item, spec)
            times = await in_turns(
                {"raw": partial(bench.timed, post), "ours": partial(bench.timed, search)}, repeats
            )
            for raw, ours in zip(times.outputs["raw"], times.outputs["ours"], strict=True):
                walls.append(ours[0] / raw[0])
                cpus.append(ours[1] / max(0.01, raw[1]))
                say(f"{spec.policy}: {ours[0]:.2f} s, raw {raw[0]:.2f} s")
    return row(
        policy=spec.policy,
        width=spec.width,
        searches=len(items),
        wall_vs_raw=[statistics.median(walls), min(walls), max(walls)],
        cpu_vs_raw=[statistics.median(cpus), min(cpus), max(cpus)],
        requests_a_round=most,
    )


async def requests(bench: Bench, items: Sequence[Item], spec: SearchSpec) -> dict[str, Any]:
    """Count the requests of a policy's rounds."""
    with bench.counted() as counted:
        for item in items:
            await bench.search(item, spec, counted)
    say(f"{spec.policy} {spec.width}: at most {counted.most} requests a server and round")
    return row(
        policy=spec.policy,
        width=spec.width,
        searches=len(items),
        requests_a_round=counted.most,
        requests=counted.total,
    )


def notes(width: int) -> dict[str, Any]:
    """Measure rounds' notes to a server: ``width`` new rewards, and half as many dead nodes."""
    tree, server = PluginNotes("key/0123456789abcdef0123456789abcdef"), plugged_server()
    tree.take(Hint(active=(0,)))
    tree.on(server, 57, None)
    sizes, seconds = [], []
    for first in range(1000, 1000 + 2 * width * NOTED_ROUNDS, 2 * width):
        nodes = range(first, first + width)
        tree.take(Hint(dict.fromkeys(nodes, 0.1234), tuple(nodes[::2]), tuple(nodes[1::2])))
        texts = [tree.on(server, 57, (node + width, node))["custom_params"][NAME] for node in nodes]
        start = time.process_time()
        for note in texts:
            parse_note(note)
        seconds.append(time.process_time() - start)
        sizes.append(sum(map(len, texts)))
    return row(
        policy="rebase",
        width=width,
        note_bytes=max(sizes),
        note_ms=2 * 1000 * statistics.median(seconds),
    )


async def measure(
    python: Path,
    quick: bool,
    only: str | None = None,
    keep: Path | None = None,
    repeats: int | None = None,
) -> list[dict[str, Any]]:
    """Measure all cells or some: one search after the other, several in small pools, by replay."""
    rows = []
    if only in (None, "rounds"):
        pairs = repeats or (1 if quick else PAIRS)
        rows += await rounds(Place(python), quick, pairs)
    if only in (None, "pools"):
        rows += [row(**cell) async for cell in pools(python, quick=quick, repeats=repeats or 1)]
    if only in (None, "grid"):
        rows += [row(**cell) for cell in await grid(python, quick=quick, keep=keep)]
    return rows


async def rounds(place: Place, quick: bool, pairs: int) -> list[dict[str, Any]]:
    """Measure requests and seconds of rounds, on real servers with room for all."""
    servers = place.servers()
    items = items_of(TASK, "dev", 3 if quick else 10, seed=0)
    async with started(servers), engine_on(servers[:1], servers[1:]) as engine:
        bench = Bench(engine, servers)
        cells = [
            await against_raw(bench, items, place.spec("self_consistency", 64), pairs),
            await requests(bench, items, place.spec("rebase", 64)),
            await requests(bench, items, place.spec("ets", 64)),
        ]
    return [cell | {"pool": place.kv_tokens} for cell in cells] + [notes(WIDEST)]


def main() -> None:
    """Measure, and print a table or a JSON document with ``rows``."""
    parser = BenchmarkParser(
        "sglang",
        __doc__,
        "python",
        quick="3 searches a cell, with one pair each",
        keep="file of the grid's cells, not run again",
        repeats="pairs a question (rounds, default 3) or a cell (pools, default 1)",
    )
    parser.add_argument("--only", choices=("rounds", "pools", "grid"), help="some cells only")
    options = parser.parse_args()
    rows = to_its_end(
        measure(options.python, options.quick, options.only, options.kept_in, options.repeats)
    )
    publish({"rows": rows}, options.json, "SGLang", KEYS)


if __name__ == "__main__":
    main()
