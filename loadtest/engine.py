"""What does one decode step cost, what does exact arithmetic add, and what does it save us from?

`python -m loadtest.engine [--quick] [--json]`. Steps of the bundled policy with contexts of 100
tokens, exact and plain forward and their floor interleaved in one run; medians, with the number of
threads that is fastest for the forward. Then whole searches against the loop that scripts run on
transformers, a question each in turn, with one thread and with all, of which the faster counts.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import numpy as np
import torch

from loadtest.generate_loop import GenerateLoop
from loadtest.options import BenchmarkParser
from loadtest.report import publish, say
from loadtest.searches import Item, Method, dev_questions, embedded, grow
from loadtest.turns import in_turns
from runtime.embedded.embedded_engine import let_threads_rest
from runtime.embedded.model.batch_plan import Span
from runtime.embedded.model.forward import Forward
from runtime.embedded.model.layers import Matrix, cut, product
from runtime.embedded.model.threads import TURN_PASSES, TURNS, ThreadTuner, thread_counts
from search.spec import SearchSpec
from search.tree import combined_digest

POLICY = "models/sprig/policy"
SEQUENCES = (1, 16, 64, 256)
CONTEXT = 100
SHARED = 32
OWN_TOKENS = CONTEXT - SHARED
WIDTH = 64


class Decoding:
    """``sequences`` rows, each at the end of its own context after a shared prefix."""

    def __init__(self, forward: Forward, sequences: int) -> None:
        own_tokens = OWN_TOKENS
        self.forward = forward
        self.store = forward.new_store(SHARED + sequences * own_tokens)
        rng = np.random.default_rng(0)
        shared = np.arange(SHARED)
        ids = rng.integers(0, forward.config.vocab, (sequences, CONTEXT))
        ids[:, :SHARED] = ids[0, :SHARED]
        tables = [
            np.concatenate([shared, SHARED + i * own_tokens + np.arange(own_tokens)])
            for i in range(sequences)
        ]
        for tokens, slots in zip(ids, tables, strict=True):
            forward.run([Span(tokens, 0, slots, CONTEXT)], self.store)
        last = CONTEXT - 1
        self.spans = [
            Span(tokens[last:], last, slots, 0) for tokens, slots in zip(ids, tables, strict=True)
        ]

    def step(self) -> None:
        """Run one decode step of all rows."""
        self.forward.run(self.spans, self.store)


class Floor:
    """What a decode step cannot do without: its products and softmax on ready operands.

    Every layer has operands of its own, since no cache holds a model's weights and KV; rows are
    multiplied in the forward's tiles, and the shared prefix is attended once for all rows.
    """

    def __init__(self, forward: Forward, sequences: int) -> None:
        config = forward.config
        self.pieces = cut(sequences, forward.tiles.rows)
        rows = self.pieces[-1][1]
        heads, kv_heads, size = config.heads, config.kv_heads, config.head_dim
        shapes = (
            (config.hidden, (heads + 2 * kv_heads) * size),
            (heads * size, config.hidden),
            (config.hidden, config.ffn),
            (config.hidden, config.ffn),
            (config.ffn, config.hidden),
        )
        self.products = [
            [self._product(rows, *shape) for shape in shapes] for _ in range(config.layers)
        ]
        self.head = self._product(rows, config.hidden, config.vocab)
        group = heads // kv_heads
        extents = ((kv_heads, sequences * group, SHARED), (sequences * kv_heads, group, OWN_TOKENS))
        self.attention = [
            [self._attention(*extent, size) for extent in extents] for _ in range(config.layers)
        ]

    @staticmethod
    def _product(rows: int, inputs: int, outputs: int) -> tuple[torch.Tensor, Matrix]:
        return torch.randn(rows, inputs), Matrix(torch.randn(outputs, inputs))

    @staticmethod
    def _attention(pairs: int, rows: int, keys: int, size: int) -> tuple[torch.Tensor, ...]:
        shapes = ((pairs, rows, size), (pairs, size, keys), (pairs, keys, size))
        return tuple(torch.randn(shape) for shape in shapes)

    def step(self) -> None:
        """Run the products of all layers and of the head."""
        with torch.inference_mode():
            for products, attention in zip(self.products, self.attention, strict=True):
                for x, matrix in products:
                    product(x, self.pieces, matrix.times)
                for query, keys, values in attention:
                    torch.bmm(torch.softmax(torch.bmm(query, keys), -1), values)
            product(self.head[0], self.pieces, self.head[1].times)


def decode_rows(most: int, repeats: int) -> list[dict]:
    """A row for each number of sequences, with ``most`` threads (0: the fastest number)."""
    counts = (most,) if most else thread_counts(os.cpu_count() or 1)
    exact = Forward(POLICY, exact=True, threads=counts)
    plain = Forward(POLICY, exact=False, threads=counts)
    rows = []
    for n in SEQUENCES:
        threads = fastest_threads(exact, counts, n)
        exact.threads = plain.threads = ThreadTuner((threads,))
        calls = {
            "exact": Decoding(exact, n).step,
            "plain": Decoding(plain, n).step,
            "floor": Floor(exact, n).step,
        }
        asyncio.run(in_turns(calls, 1))  # warms up
        times = asyncio.run(in_turns(calls, repeats))
        decode, without, floor = (1e3 * times.median(what) for what in calls)
        rows.append(
            {
                "sequences": n,
                "threads": threads,
                "decode_ms": round(decode, 3),
                "plain_ms": round(without, 3),
                "floor_ms": round(floor, 3),
                "decode_vs_floor": round(decode / floor, 3),
                "exact_cost": round(decode / without - 1, 3),
            }
        )
        say(f"{n} sequences: {decode:.2f} ms, plain {without:.2f} ms")
    return rows


def fastest_threads(forward: Forward, counts: Sequence[int], sequences: int) -> int:
    """The number of threads that the forward picks for decode steps of ``sequences`` rows."""
    forward.threads = tuner = ThreadTuner(counts)
    decoding = Decoding(forward, sequences)
    for _ in range(4 * TURN_PASSES * TURNS * len(counts)):
        decoding.step()
    return tuner.at(sequences)


async def against_the_loop(threads: int, questions: int, width: int) -> dict:
    """Compare the speed of beam searches, one at a time, with that of the generate loop."""
    spec = SearchSpec(policy="beam", width=width, seed=0)
    loop, method = GenerateLoop(1), Method(spec.policy, spec)
    rows = []
    async with embedded(threads=threads) as engine:
        await grow(engine, Item(*dev_questions(questions + 1)[-1], 0), method)
        for task, question in dev_questions(questions):
            seconds, digests = [], []
            for contender, count in ((engine, 0), *((loop, n) for n in loop_counts(threads))):
                torch.set_num_threads(count or 1)
                start = time.perf_counter()
                outcome = await grow(contender, Item(task, question, 0), method)
                seconds.append(time.perf_counter() - start)
                digests.append(outcome.digest)
            rows.append((task, seconds[0], min(seconds[1:]), digests[0], digests[1]))
            say(f"{task}: {seconds[0]:.2f} s, loop {seconds[1:]} s")
        used = engine.capabilities.threads
    names, ours, theirs, engine_digests, loop_digests = zip(*rows, strict=True)
    return {
        "speedup_vs_generate_loop": round(sum(theirs) / sum(ours), 3),
        "generate_loop": {
            "width": width,
            "threads": used,
            "loop_threads": loop_counts(threads),
            "speedup": [(n, round(b / a, 2)) for n, a, b in zip(names, ours, theirs, strict=True)],
            "identical_trees": sum(map(str.__eq__, engine_digests, loop_digests)) / len(rows),
            "tree_digest": combined_digest(engine_digests),
        },
    }


def loop_counts(threads: int) -> list[int]:
    """The loop's numbers of threads, of which the fastest counts for each question."""
    return [threads] if threads else sorted({1, os.cpu_count() or 1})


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = BenchmarkParser(
        "engine",
        __doc__,
        quick="fewer repeats and questions",
        threads="0: the fastest, on both sides",
    )
    parser.set_defaults(threads=0)
    options = parser.parse_args()
    let_threads_rest()  # in the process below, as the engine does
    with ProcessPoolExecutor(1, get_context("spawn")) as process:
        repeats = 9 if options.quick else 31
        report: dict[str, Any] = {
            "rows": process.submit(decode_rows, options.threads, repeats).result()
        }
    report |= asyncio.run(against_the_loop(options.threads, 4 if options.quick else 12, WIDTH))
    publish(report, options.json, "A decode step", tuple(report["rows"][0]))
    if not options.json:
        print("  ".join(f"{key} {value}" for key, value in report["generate_loop"].items()))
        print(f"speedup_vs_generate_loop {report['speedup_vs_generate_loop']}")


if __name__ == "__main__":
    main()
