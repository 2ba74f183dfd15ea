"""What drawing a token takes of a decode step at a real vocabulary, in the processor's time.

By turns in one run, and in the time that this process has had, so that others on the machine count
for little: at 49,152 ids the embedded engine's draw beside SmolLM2's own step; at 151,936 the
SGLang plug-in's, in isolation, beside the products of a step of Qwen2.5-1.5B's shapes in float32
(one layer's, times 28, and the head's; attention, norms and SGLang's own time left out, with which
the share is less).
"""

from __future__ import annotations

import statistics
import time
import tracemalloc
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hedgerow_sglang import seeded_sampling
from loadtest.engine import Decoding
from loadtest.report import say
from models.tasks import TASKS
from runtime.embedded.model.forward import Forward
from runtime.embedded.model.threads import thread_counts
from runtime.embedded.sampler import sample
from runtime.text import Text

ROWS = (1, 8, 32, 64)
DRAWS = {"plain": (1.0, 1.0), "top_p": (0.7, 0.95)}
"""Temperature and top-p of what is drawn."""
VOCAB = 151_936
LAYERS = 28
LAYER = ((1536, 2048), (1536, 1536), (1536, 2 * 8960), (8960, 1536))
"""Inputs and outputs of a layer's products."""
HIDDEN = 1536


def processor_time(calls: Sequence[Callable[[], object]], repeats: int) -> list[float]:
    """Median milliseconds of all this process's threads in each call, taken in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, taken in zip(calls, times, strict=True):
            start = time.process_time()
            call()
            taken.append(1e3 * (time.process_time() - start))
    return [statistics.median(taken[1:]) for taken in times]


def shares(
    step: float, draws: dict[str, Callable[[], object]], took: Sequence[float]
) -> dict[str, Any]:
    """Of a step with its draw, by kind of draw; and the bytes that drawing takes at most."""
    row: dict[str, Any] = {"step_ms": round(step, 2)}
    for (name, draw), milliseconds in zip(draws.items(), took, strict=True):
        row[f"{name}_ms"] = round(milliseconds, 2)
        row[f"{name}_share"] = round(milliseconds / (step + milliseconds), 3)
        row[f"{name}_megabytes"] = round(most_bytes(draw) / 1e6, 2)
    return row


def most_bytes(draw: Callable[[], object]) -> int:
    """That a call has at once beside what it was given and what is kept between calls: numpy's
    arrays and torch's tensors."""
    with torch.profiler.profile(profile_memory=True):  # what it makes at first use
        draw()
    tracemalloc.start()
    with torch.profiler.profile(profile_memory=True) as profile:
        draw()
    arrays = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    recorded: Any = profile.profiler  # whose events torch's types leave out
    held = most = 0
    for event in recorded.kineto_results.events():
        if event.name() == "[memory]":
            held += event.nbytes()
            most = max(most, held)
    return arrays + most


def embedded_rows(folder: Path, threads: int, repeats: int) -> list[dict[str, Any]]:
    """At SmolLM2's vocabulary."""
    forward = Forward(folder, threads=thread_counts(threads))
    words = Text(folder).encode("\n".join(TASKS["wordproblem"].questions("dev", 200, 0)))
    rows = []
    for n in ROWS:
        decoding = Decoding(forward, n, words)
        logits = forward.run(decoding.spans, decoding.store)
        seeds, places = np.arange(n, dtype=np.uint64), np.full(n, 100)
        draws: dict[str, Callable[[], object]] = {
            name: lambda x=logits, s=seeds, p=places, d=drawn: sample(x, s, p, *d)
            for name, drawn in DRAWS.items()
        }
        step, *took = processor_time([decoding.step, *draws.values()], repeats)
        rows.append({"rows": n, "threads": threads} | shares(step, draws, took))
        say(str(rows[-1]))
    return rows


class Products:
    """A decode step's products of Qwen2.5-1.5B's shapes."""

    def __init__(self) -> None:
        self.layer = [torch.rand(outputs, inputs) for inputs, outputs in LAYER]
        self.head = torch.rand(VOCAB, HIDDEN)

    def one_layer(self, rows: int) -> list[Tensor]:
        """Of one layer; each product has an operand of its own."""
        return [torch.rand(rows, weight.shape[1]) @ weight.T for weight in self.layer]

    def logits(self, rows: int) -> Tensor:
        """Of the head."""
        return torch.rand(rows, HIDDEN) @ self.head.T


def plugin_rows(repeats: int) -> list[dict[str, Any]]:
    """At Qwen2.5's vocabulary, on one thread, as SGLang runs here."""
    torch.set_num_threads(1)
    products, rows = Products(), []
    dice = np.random.default_rng(0)
    for n in ROWS:
        logits = torch.from_numpy(dice.normal(0, 3, (n, VOCAB)).astype(np.float32))
        logits[torch.arange(n), torch.from_numpy(dice.integers(0, VOCAB, n))] += 22
        info = SimpleNamespace(
            sampling_seed=torch.arange(n),
            top_ks=torch.full((n,), 1 << 30),
            min_ps=torch.zeros(n),
            need_top_k_sampling=False,
            need_min_p_sampling=False,
        )
        draws: dict[str, Callable[[], object]] = {}
        for name, (heat, mass) in DRAWS.items():
            own = SimpleNamespace(
                **vars(info), top_ps=torch.full((n,), mass), need_top_p_sampling=mass < 1
            )
            probs = torch.softmax(logits / heat, -1)
            draws[name] = lambda p=probs, i=own, k=n: seeded_sampling.sample(
                p, i, torch.full((k,), 100)
            )
        calls = [lambda k=n: products.one_layer(k), lambda k=n: products.logits(k)]
        layer, head, *took = processor_time([*calls, *draws.values()], repeats)
        rows.append({"rows": n, "threads": 1} | shares(LAYERS * layer + head, draws, took))
        say(str(rows[-1]))
    return rows
