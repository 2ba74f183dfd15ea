"""What is said of a wrong set-up, how soon, and is every SGLang server alive afterwards?

`python -m loadtest.sglang_wrong_set_ups [--json]`. Two real SGLang servers on the CPU, one that
generates and one of embeddings, with tiny random models; before them `hedgerow serve` as somebody
types it, once for each mistake. Seconds are from the command to the line that says it, beside the
processor's time of all that; asked as it was meant, three of the mistakes would end a server.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx

from loadtest.on_sglang import PYTHON, policy_server, reward_server, started
from loadtest.report import publish, say
from runtime.sglang.launched_server import LaunchedServer
from tests.runtime.test_reward_models import QWEN, QWEN_SPECIALS
from tests.runtime.tiny_models import make_checkpoint, make_reward_model

COLUMNS = ("mistake", "message", "seconds", "cpu_seconds", "exit", "servers_alive")
KV_TOKENS = 2_000
NOBODY = "http://127.0.0.1:9"
HEAD = {"v_head.summary.weight": (1, 64), "v_head.summary.bias": (1,)}
SAYS = re.compile(r"^hedgerow: |waiting for")
"""Lines that say what is wrong."""
MOST_SECONDS = 600.0


def make_models(root: Path) -> dict[str, Path]:
    """``text`` and ``head`` are served. ``twin`` has the first one's tokenizer and sizes, ``wide``
    more ids; ``head`` has one output."""
    return {
        "text": make_checkpoint(root / "text", "qwen3"),
        "twin": make_checkpoint(root / "twin", "qwen2"),
        "wide": make_checkpoint(root / "wide", "qwen3", vocab_size=512),
        "head": make_reward_model(
            root / "head", HEAD, "Qwen2ForPrmModel", specials=QWEN_SPECIALS, template=QWEN
        ),
    }


def mistakes(models: dict[str, Path], policy: str, reward: str) -> dict[str, list[str]]:
    """The arguments of each; ``policy`` and ``reward`` are the servers' addresses."""
    at = ["--engine", "sglang", "--policy-url", policy]
    judged = ["--reward-model", str(models["head"]), "--reward-url", reward, "--reward-format"]
    text = str(models["text"])
    return {
        "verdicts of an embedding server": [text, *at, *judged, "math-shepherd"],
        "a larger vocabulary": [str(models["wide"]), *at],
        "another model with the same tokenizer": [str(models["twin"]), *at],
        "one output for two": [text, *at, *judged, "qwen2.5-math-prm"],
        "an absent server": [text, "--engine", "sglang", "--policy-url", NOBODY],
        "a hub id without network": ["Qwen/Qwen2.5-Math-1.5B-Instruct"],
        "a bad folder": [str(models["text"].with_name("nowhere"))],
    }


def serve(arguments: Sequence[str], home: Path) -> dict[str, Any]:
    """A row of what `hedgerow serve` says first of what is wrong. Who only waits is ended then."""
    env = os.environ | {"HF_ENDPOINT": NOBODY, "HF_HOME": str(home)}
    command = [sys.executable, "-m", "cli", "serve", *arguments, "--port", "0"]
    before, start = _cpu_seconds(), time.monotonic()
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=env) as process:
        assert process.stderr is not None
        line = next((line for line in process.stderr if SAYS.search(line)), "")
        seconds = time.monotonic() - start
        if "waiting for" in line:
            process.terminate()
        process.stderr.read()
        code = process.wait(MOST_SECONDS)
    return {
        "message": line.strip() or "nothing",
        "seconds": round(seconds, 1),
        "cpu_seconds": round(_cpu_seconds() - before, 1),
        "exit": "waits" if "waiting for" in line else code,
    }


def _cpu_seconds() -> float:
    """Of all that has been started and has ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def alive(server: LaunchedServer) -> bool:
    """Whether it still computes."""
    address = f"{server.url}/health_generate"
    return server.ended is None and httpx.get(address, timeout=120.0, trust_env=False).is_success


async def run(python: Path, root: Path) -> list[dict[str, Any]]:
    """A row for every mistake."""
    models = make_models(root)
    policy = policy_server(python, "lru", KV_TOKENS, model=models["text"], seeds=False)
    reward = reward_server(python, KV_TOKENS, model=models["head"])
    reward = LaunchedServer(replace(reward.options, classifies=True))
    rows = []
    async with started([policy, reward]):
        for name, arguments in mistakes(models, policy.url, reward.url).items():
            row = {"mistake": name} | await asyncio.to_thread(serve, arguments, root / "hub")
            row["servers_alive"] = await asyncio.to_thread(
                lambda: all([alive(policy), alive(reward)])
            )
            rows.append(row)
            say(str(row))
    return rows


def main() -> None:
    """``python -m loadtest.sglang_wrong_set_ups``."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--sglang", type=Path, default=PYTHON, help="its environment's Python")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as root:
        rows = asyncio.run(run(given.sglang, Path(root)))
    publish({"rows": rows}, given.json, "Wrong set-ups", COLUMNS)


if __name__ == "__main__":
    main()
