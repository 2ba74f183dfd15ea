"""How fast is a real chat model, SmolLM2-135M-Instruct, on the embedded engine?

`python -m loadtest.real_model [--json]`. Tokens a second of 1, 8 and 32 branches of one prompt,
deduplicated and not, against transformers' `generate` in float32, by turns in one run on as many
threads, and SGLang's on the CPU (`--sglang`), whose arithmetic has one thread here: `--threads 1`
gives all of them one. Searches in a quarter of the KV that they hold at most: equal trees, what was
computed again, the time. Seconds from `hedgerow serve smollm2` to its first answer, without
caches and once more with them.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import torch

from loadtest.on_sglang import PYTHON, engine_on, policy_server, started, to_its_end
from loadtest.options import BenchmarkParser
from loadtest.report import publish, say
from loadtest.searches import embedded
from loadtest.served import Served
from loadtest.turns import in_turns
from models.smollm2 import smollm2_folder
from runtime.embedded.embedded_engine import let_threads_rest
from runtime.embedded.options import EngineOptions
from runtime.text import Text
from search.controller import search
from search.engine import Branch, Engine, Sampling
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import ROOT

BRANCHES = (1, 8, 32)
TOKENS = 48
CORES = os.cpu_count() or 1
KV_TOKENS = 20_000
QUESTION = "A pen costs 3 coins and a book 12. How much are two pens and a book?"
LONG: dict[str, Any] = {"step_tokens": 24, "trajectory_tokens": 96, "seed": 0}
SPECS = (
    SearchSpec(policy="self_consistency", width=16, ignore_eos=True, **LONG),
    SearchSpec(policy="rebase", width=16, **LONG),
    SearchSpec(policy="best_first", width=16, **LONG),
    SearchSpec(policy="mcts", width=16, **LONG),
)
ONLY = ("rates", "kv", "start")


class Generating:
    """transformers' `generate`, sampling, as many copies of a prompt as there are branches."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM  # takes seconds

        loaded: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.model = loaded.eval()

    async def run(self, prompt: Sequence[int], branches: int) -> int:
        """Draw from a prompt; the number of tokens drawn."""
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
    """Rounds of an engine, each of which draws children of one prompt."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.rounds = 0

    async def run(self, prompt: Sequence[int], branches: int) -> int:
        """Draw from a prompt; the number of tokens drawn."""
        self.rounds += 1
        tree = f"round-{self.rounds}"
        sampling = Sampling(stop=(), max_step_tokens=TOKENS)
        children = [
            Branch(ROOT, i, tuple(prompt), self.rounds << 16 | i, TOKENS, i + 1)
            for i in range(branches)
        ]
        steps = await self.engine.expand(tree, children, sampling)
        await self.engine.release(tree)
        return sum(len(step.tokens) for step in steps)


async def rate_rows(folder: Path, repeats: int, threads: int, sglang: bool) -> list[dict[str, Any]]:
    """Tokens a second of each engine, and over those of `generate`; every repeat has a prompt that
    is not cached."""
    text, prompts = Text(folder), iter(range(10**6))

    def prompt() -> list[int]:
        content = f"Story {next(prompts)}: tell at length of a fox, a river and a long winter."
        return text.encode_chat([{"role": "user", "content": content}])

    torch.set_num_threads(threads)
    plain = EngineOptions(policy=folder, reward_format="none", threads=threads)
    rows = []
    async with AsyncExitStack() as ends:
        drawing: dict[str, Expanding | Generating] = {"generate": Generating(folder)}
        for name, dedup in (("embedded", True), ("no_dedup", False)):
            engine = embedded(plain, dedup=dedup)
            drawing[name] = Expanding(await ends.enter_async_context(engine))
        if sglang:
            server = policy_server(PYTHON, "lru", KV_TOKENS, model=folder)
            await ends.enter_async_context(started([server]))
            drawing["sglang"] = Expanding(await ends.enter_async_context(engine_on([server], [])))
        for branches in BRANCHES:
            calls = {
                name: lambda drawer=drawer, n=branches: drawer.run(prompt(), n)
                for name, drawer in drawing.items()
            }
            await in_turns(calls, 1)  # warms up
            times = await in_turns(calls, repeats)
            speeds = {name: statistics.median(times.rates(name)) for name in calls}
            row: dict[str, Any] = {"branches": branches, "threads": threads}
            row |= {f"{name}_tokens_a_second": round(v, 1) for name, v in speeds.items()}
            ours = (name for name in speeds if name != "generate")
            row |= {f"{n}_ratio": round(speeds[n] / speeds["generate"], 2) for n in ours}
            rows.append(row)
            say(str(row))
    return rows


async def kv_rows(folder: Path, threads: int) -> list[dict[str, Any]]:
    """Run each search with ample KV, and in a quarter of the most that it then held."""
    plain = EngineOptions(policy=folder, reward_format="none", threads=threads)
    rows = []
    for spec in SPECS:
        roomy, seconds = await grow_timed(replace(plain, kv_tokens=KV_TOKENS), spec)
        peak = roomy.stats.engine.kv_tokens_peak
        tight, tight_seconds = await grow_timed(replace(plain, kv_tokens=peak // 4), spec)
        cost = tight.stats.engine
        rows.append(
            {
                "policy": f"{spec.policy} {spec.width}",
                "kv_tokens": peak,
                "quarter": peak // 4,
                "same_tree": tight.digest == roomy.digest,
                "decoded": cost.decoded_tokens,
                "computed_again": cost.rehydrated_tokens,
                "time_ratio": round(tight_seconds / seconds, 2),
            }
        )
        say(str(rows[-1]))
    return rows


async def grow_timed(options: EngineOptions, spec: SearchSpec) -> tuple[Outcome, float]:
    """Run one search on an engine of its own; the outcome and its seconds."""
    text = Text(options.policy)
    prompt = tuple(text.encode_chat([{"role": "user", "content": QUESTION}]))
    async with embedded(options) as engine:
        start = time.perf_counter()
        outcome = await search(
            Problem(prompt=prompt, question=QUESTION),
            spec,
            engine,
            tree_id=spec.policy,
            answer_of=lambda reply: reply.strip() or None,
            clock=time.monotonic,
            context_tokens=engine.capabilities.context_tokens,
        )
        return outcome, time.perf_counter() - start


def start_row() -> dict[str, float]:
    """Seconds from the command to ready, and to the first answer."""
    start = time.perf_counter()
    with Served("smollm2") as served:
        ready = time.perf_counter() - start
        hello = [{"role": "user", "content": "Hello!"}]
        body = {"model": "smollm2", "messages": hello, "max_tokens": 8}
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=body, timeout=60.0)
        answer.raise_for_status()
        first_answer = time.perf_counter() - start
    return {"ready_seconds": round(ready, 2), "answered_seconds": round(first_answer, 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    """Print tables, or one JSON document with ``--json``."""
    parser = BenchmarkParser("real_model", __doc__, "repeats", "threads")
    parser.set_defaults(repeats=5, threads=CORES)
    parser.add_argument("--only", choices=ONLY, help="default: all")
    parser.add_argument("--sglang", action="store_true", help="rates: beside SGLang on the CPU")
    options = parser.parse_args(arguments)
    let_threads_rest()  # in the processes below, as the engine does
    folder, threads, repeats = smollm2_folder(), options.threads, options.repeats
    parts = ONLY if options.only is None else (options.only,)
    tables: dict[str, list[dict[str, Any]]] = {}
    if "rates" in parts:
        tables["rates"] = to_its_end(rate_rows(folder, repeats, threads, options.sglang))
    if "kv" in parts:
        tables["kv"] = asyncio.run(kv_rows(folder, threads))
    if "start" in parts:
        with tempfile.TemporaryDirectory() as cache:
            os.environ["XDG_CACHE_HOME"] = cache
            tables["start"] = [{"start": name} | start_row() for name in ("first", "again")]
    if options.json:
        publish(tables, True)
        return
    for title, rows in tables.items():
        publish({"rows": rows}, False, title, list(rows[0]))


if __name__ == "__main__":
    main()
