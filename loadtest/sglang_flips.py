"""How often SGLang's arithmetic flips a token that the embedded engine draws from the same noise.

Each step is drawn three times from equal ids and seeds: by the embedded engine, by a SGLang server
with our plug-in whose cache has the prefix as decoding made it, and by the same server after a
flush, its prefix prefilled anew. Streams are compared up to their first difference; what follows
one is another text. ``python -m loadtest.sglang_flips --url http://127.0.0.1:30000``.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httpx

from hedgerow_sglang.plugin_protocol import plugin_counts, sampling_seed
from loadtest.options import BenchmarkParser, at_least
from loadtest.report import publish, say
from loadtest.searches import SPRIG, Engines, dev_questions
from runtime.text import Text
from search.engine import Branch, Engine, Sampling
from search.tree import ROOT, node_seed

COLUMNS = (
    *("against", "dtype", "temperature", "top_p", "steps", "equal_steps", "tokens", "flips"),
    "flips_per_1000_tokens",
)
LENGTH = 24
CHILDREN = 4
SETTINGS = ((0.0, 1.0), (1.0, 1.0), (0.7, 0.9))
"""Temperature and top-p: greedy, the searches' default, ArborKV's."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """Where steps are forked from, and the seeds of its children."""

    tokens: tuple[int, ...]
    seeds: tuple[int, ...]


class Server:
    """A SGLang server with our plug-in."""

    def __init__(self, http: httpx.AsyncClient, text: Text) -> None:
        self._http = http
        self._text = text

    async def dtype(self) -> str:
        """What it computes in. Raises ValueError without the plug-in."""
        info = (await self._http.get("/server_info")).raise_for_status().json()
        told = plugin_counts(info)
        if told is None or not told["seeds"]:
            raise ValueError("url: the server there does not run our plug-in")
        if info["dtype"] != "auto":
            return str(info["dtype"])
        config = json.loads((self._text.checkpoint / "config.json").read_text(encoding="utf-8"))
        return str(config.get("dtype") or config.get("torch_dtype"))

    async def flush(self) -> None:
        """Forget all KV."""
        (await self._http.post("/flush_cache")).raise_for_status()

    async def draw(self, prefixes: Sequence[Prefix], sampling: Sampling) -> list[tuple[int, ...]]:
        """A step of every prefix and seed, in order."""
        asked = [(prefix.tokens, seed) for prefix in prefixes for seed in prefix.seeds]
        return await asyncio.gather(*(self._draw(*one, sampling) for one in asked))

    async def _draw(
        self, tokens: tuple[int, ...], seed: int, sampling: Sampling
    ) -> tuple[int, ...]:
        body = {
            "input_ids": list(tokens),
            "sampling_params": {
                "max_new_tokens": sampling.max_step_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "stop_token_ids": sorted(self._text.eos),
                "sampling_seed": sampling_seed(seed),
            },
        }
        answer = (await self._http.post("/generate", json=body)).raise_for_status().json()
        return tuple(answer["output_ids"])


async def embedded(
    engine: Engine, prefixes: Sequence[Prefix], sampling: Sampling
) -> list[tuple[int, ...]]:
    """The same steps by the embedded engine."""
    branches = [
        Branch(ROOT, child, prefix.tokens, seed, sampling.max_step_tokens, node)
        for node, (prefix, child, seed) in enumerate(
            ((p, child, seed) for p in prefixes for child, seed in enumerate(p.seeds)), 1
        )
    ]
    try:
        return [step.tokens for step in await engine.expand("flips", branches, sampling)]
    finally:
        await engine.release("flips")


def compare(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Of streams in pairs: tokens up to and with the first difference, and how many differ."""
    tokens = flips = 0
    for one, other in zip(left, right, strict=True):
        same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)
        differ = same is not None or len(one) != len(other)
        tokens += min(len(one), len(other)) if same is None else same + 1
        flips += differ
    return {
        "steps": len(left),
        "equal_steps": round(1 - flips / len(left), 4),
        "tokens": tokens,
        "flips": flips,
        "flips_per_1000_tokens": round(1000 * flips / tokens, 3),
    }


def forked(prefixes: Sequence[Prefix], steps: Sequence[tuple[int, ...]]) -> list[Prefix]:
    """The first child of each prefix, to be forked in its turn."""
    firsts = steps[:: len(prefixes[0].seeds)]
    return [
        Prefix(
            (*prefix.tokens, *step), tuple(node_seed(seed, "draw", (0,)) for seed in prefix.seeds)
        )
        for prefix, step in zip(prefixes, firsts, strict=True)
    ]


async def measure(url: str, questions: int) -> list[dict[str, Any]]:
    """A row for each setting and each of the two comparisons."""
    text = Text(SPRIG.policy)
    asked = [question for _, question in dev_questions(questions)]
    roots = [
        Prefix(
            tuple(text.encode_chat([{"role": "user", "content": question}])),
            tuple(node_seed(i, "draw", (child,)) for child in range(CHILDREN)),
        )
        for i, question in enumerate(asked)
    ]
    rows = []
    async with (
        httpx.AsyncClient(base_url=url, timeout=600, trust_env=False) as http,
        Engines(threads=1) as engine,
    ):
        server = Server(http, text)
        dtype = await server.dtype()
        for temperature, top_p in SETTINGS:
            sampling = Sampling(temperature, top_p, stop=(), max_step_tokens=LENGTH)
            first = await server.draw(roots, sampling)
            forks = forked(roots, first)
            warm = await server.draw(forks, sampling)
            await server.flush()
            cold = await server.draw(forks, sampling)
            ours = await embedded(engine, roots, sampling)
            shared = {"dtype": dtype, "temperature": temperature, "top_p": top_p}
            rows.append({"against": "embedded"} | shared | compare(ours, first))
            rows.append({"against": "itself evicted"} | shared | compare(warm, cold))
            say(f"{rows[-2]}\n{rows[-1]}")
    return rows


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser("sglang_flips", __doc__)
    parser.add_argument("--url", required=True, help="a SGLang server with our plug-in")
    parser.add_argument("--questions", type=at_least(1), default=16)
    wanted = parser.parse_args()
    rows = asyncio.run(measure(wanted.url, wanted.questions))
    publish({"rows": rows}, wanted.json, "tokens that flip", COLUMNS)


if __name__ == "__main__":
    main()
