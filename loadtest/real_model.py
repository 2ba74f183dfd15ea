"""How fast is a real chat model, SmolLM2-135M-Instruct, on the embedded engine?

`python -m loadtest.real_model [--json]`. Tokens a second of 1, 8 and 32 branches of one prompt
against transformers' `generate` in float32, by turns in one run, each on all cores; the draw's
share of a decode step at 49,152 ids, and what memory it takes beside the logits; seconds from
`hedgerow serve smollm2` to its first answer, with nothing made before and once more.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
import tracemalloc
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch

from loadtest.engine import Decoding, interleaved
from loadtest.report import publish, say
from loadtest.served import Served
from loadtest.turns import in_turns
from models.smollm2 import smollm2_folder
from models.tasks import TASKS
from runtime.embedded.embedded_engine import EmbeddedEngine, let_threads_rest
from runtime.embedded.model.forward import Forward
from runtime.embedded.model.threads import thread_counts
from runtime.embedded.options import EngineOptions
from runtime.embedded.sampler import sample
from runtime.text import Text
from search.engine import Branch, Sampling
from search.tree import ROOT

BRANCHES = (1, 8, 32)
ROWS = (1, 8, 32, 64)
TOKENS = 48
DRAWS = {"plain": (1.0, 1.0), "top_p": (0.7, 0.95)}
"""Temperature and top-p of what is drawn."""
CORES = os.cpu_count() or 1


class Generating:
    """transformers' `generate`, sampling, as many copies of a prompt as there are branches."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM  # takes seconds

        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = loaded.eval()

    async def run(self, prompt: Sequence[int], branches: int) -> int:
        """Tokens drawn."""
        ids = torch.tensor([list(prompt)] * branches)
        with torch.inference_mode():
            out = self.model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=True,
                top_k=0,
                max_new_tokens=TOKENS,
                min_new_tokens=TOKENS,
            )
        return branches * (out.shape[1] - ids.shape[1])


class Expanding:
    """A round of the embedded engine: as many children of one prompt."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self.engine = engine
        self.rounds = 0

    async def run(self, prompt: Sequence[int], branches: int) -> int:
        """Tokens drawn."""
        self.rounds += 1
        tree = f"round-{self.rounds}"
        sampling = Sampling(stop=(), max_step_tokens=TOKENS)
        asked = [
            Branch(ROOT, i, tuple(prompt), self.rounds << 16 | i, TOKENS, i + 1)
            for i in range(branches)
        ]
        steps = await self.engine.expand(tree, asked, sampling)
        await self.engine.release(tree)
        return sum(len(step.tokens) for step in steps)


@dataclass(slots=True)
class Counted:
    """One of them with its prompts and so many branches; ``tokens`` that each run has drawn."""

    drawing: Expanding | Generating
    prompt: Callable[[], list[int]]
    branches: int
    tokens: list[int] = field(default_factory=list)

    async def run(self) -> None:
        """Once more, with a new prompt."""
        self.tokens.append(await self.drawing.run(self.prompt(), self.branches))


async def rate_rows(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """Tokens a second of both, and their ratio; every repeat has a prompt that nobody has read."""
    text, prompts = Text(folder), iter(range(10**6))

    def prompt() -> list[int]:
        content = f"Story {next(prompts)}: tell at length of a fox, a river and a long winter."
        return text.encode_chat([{"role": "user", "content": content}])

    torch.set_num_threads(CORES)
    theirs = Generating(folder)
    engine = await EmbeddedEngine.start(EngineOptions(policy=folder, reward_format="none"))
    rows = []
    try:
        ours = Expanding(engine)
        for branches in BRANCHES:
            counted = [Counted(ours, prompt, branches), Counted(theirs, prompt, branches)]
            calls = dict(zip(("embedded", "generate"), (one.run for one in counted), strict=True))
            await in_turns(calls, 1)  # what is made at first use
            times = await in_turns(calls, repeats)
            speed = [
                one.tokens[-1] / times.median(name)
                for name, one in zip(calls, counted, strict=True)
            ]
            row = {"branches": branches, "ratio": round(speed[0] / speed[1], 2)}
            row |= {f"{n}_tokens_a_second": round(v, 1) for n, v in zip(calls, speed, strict=True)}
            rows.append(row)
            say(str(row))
    finally:
        await engine.close()
    return rows


def draw_rows(folder: Path, repeats: int) -> list[dict[str, Any]]:
    """A decode step, its draw, the draw's share of both, and what memory drawing takes at most."""
    forward = Forward(folder, threads=thread_counts(CORES))
    stories = TASKS["wordproblem"].questions("dev", 200, 0)
    words = Text(folder).encode("\n".join(stories))
    rows = []
    for n in ROWS:
        decoding = Decoding(forward, n, words)
        logits = forward.run(decoding.spans, decoding.store)
        seeds, places = np.arange(n, dtype=np.uint64), np.full(n, 100)
        draws = [
            lambda x=logits, s=seeds, p=places, d=drawn: sample(x, s, p, *d)
            for drawn in DRAWS.values()
        ]
        step, *took = interleaved([decoding.step, *draws], repeats)
        row: dict[str, Any] = {"rows": n, "step_ms": round(step, 2)}
        for name, draw, milliseconds in zip(DRAWS, draws, took, strict=True):
            tracemalloc.start()
            draw()
            row[f"{name}_ms"] = round(milliseconds, 2)
            row[f"{name}_share"] = round(milliseconds / (step + milliseconds), 3)
            row[f"{name}_megabytes"] = round(tracemalloc.get_traced_memory()[1] / 1e6, 2)
            tracemalloc.stop()
        rows.append(row)
        say(str(row))
    return rows


def start_row() -> dict[str, float]:
    """Seconds from the command to ready, and to the first answer."""
    began = time.perf_counter()
    with Served("smollm2") as served:
        ready = time.perf_counter() - began
        hello = [{"role": "user", "content": "Hello!"}]
        body = {"model": "smollm2", "messages": hello, "max_tokens": 8}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60.0)
        answer.raise_for_status()
        answered = time.perf_counter() - began
    return {"ready_seconds": round(ready, 2), "answered_seconds": round(answered, 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print tables, or one JSON document with ``--json``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--only", choices=("rates", "draws", "start"), help="default: all")
    parser.add_argument("--json", action="store_true", help="one JSON document on stdout")
    options = parser.parse_args(arguments)
    let_threads_rest()  # for the processes below, as in the engine's
    folder = smollm2_folder()
    found: dict[str, list[dict[str, Any]]] = {}
    if options.only in (None, "draws"):
        with ProcessPoolExecutor(1, get_context("spawn")) as process:
            found["draws"] = process.submit(draw_rows, folder, 3 * options.repeats).result()
    if options.only in (None, "rates"):
        found["rates"] = asyncio.run(rate_rows(folder, options.repeats))
    if options.only in (None, "start"):
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            found["start"] = [{"start": name} | start_row() for name in ("first", "again")]
    if options.json:
        publish(found, True)
        return
    for title, rows in found.items():
        publish({"rows": rows}, False, title, list(rows[0]))


if __name__ == "__main__":
    main()
