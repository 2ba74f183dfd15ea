"""How often SGLang's arithmetic flips a token that the embedded engine draws from the same noise.

Each step is drawn three times from equal ids and seeds: by the embedded engine, by a SGLang server
with our plug-in, on this machine's CPU, whose cache has the prefix as decoding made it, and by the
same server after a flush, its prefix prefilled anew. Streams are compared up to their first
difference; what follows one is another text. ``python -m loadtest.sglang_flips [--json]``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from loadtest.on_sglang import engine_on, forget, policy_server, started, to_its_end
from loadtest.options import BenchmarkParser, at_least
from loadtest.report import publish, say
from loadtest.searches import SPRIG, dev_questions, embedded
from runtime.text import Text
from search.engine import Branch, Engine, Sampling
from search.tree import ROOT, node_seed

COLUMNS = (
    *("against", "dtype", "temperature", "top_p", "steps", "equal_steps", "tokens", "flips"),
    "flips_per_1000_tokens",
)
DTYPES = ("bfloat16", "float32")
POOL_TOKENS = 20_000
LENGTH = 24
CHILDREN = 4
SETTINGS = ((0.0, 1.0), (1.0, 1.0), (0.7, 0.9))
"""Temperature and top-p: greedy, the searches' default, ArborKV's."""


@dataclass(frozen=True, slots=True)
class Prefix:
    """A prefix that steps are drawn after, and the seeds of its children."""

    tokens: tuple[int, ...]
    seeds: tuple[int, ...]


async def draw_steps(
    engine: Engine, prefixes: Sequence[Prefix], sampling: Sampling
) -> list[tuple[int, ...]]:
    """Draw a step for every prefix and seed, in order."""
    pairs = [(prefix, child) for prefix in prefixes for child in range(len(prefix.seeds))]
    branches = [
        Branch(ROOT, child, prefix.tokens, prefix.seeds[child], sampling.max_step_tokens, node)
        for node, (prefix, child) in enumerate(pairs, 1)
    ]
    try:
        return [step.tokens for step in await engine.expand("flips", branches, sampling)]
    finally:
        await engine.release("flips")


def compare(left: Sequence[Sequence[int]], right: Sequence[Sequence[int]]) -> dict[str, Any]:
    """Compare streams in pairs: tokens up to and with the first difference, and how many differ."""
    tokens = flips = 0
    for left_step, right_step in zip(left, right, strict=True):
        same = next(
            (i for i, (a, b) in enumerate(zip(left_step, right_step, strict=False)) if a != b), None
        )
        differ = same is not None or len(left_step) != len(right_step)
        tokens += min(len(left_step), len(right_step)) if same is None else same + 1
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


async def measure(python: Path, dtype: str, questions: int) -> list[dict[str, Any]]:
    """A row for each setting and each of the two comparisons."""
    text, rows = Text(SPRIG.policy), []
    roots = [
        Prefix(
            tuple(text.encode_chat([{"role": "user", "content": question}])),
            tuple(node_seed(i, "draw", (child,)) for child in range(CHILDREN)),
        )
        for i, (_, question) in enumerate(dev_questions(questions))
    ]
    server = policy_server(python, "lru", POOL_TOKENS, args=("--dtype", dtype))
    async with started([server]), engine_on([server], []) as sglang, embedded(threads=1) as engine:
        for temperature, top_p in SETTINGS:
            sampling = Sampling(temperature, top_p, stop=(), max_step_tokens=LENGTH)
            first = await draw_steps(sglang, roots, sampling)
            forks = forked(roots, first)
            warm = await draw_steps(sglang, forks, sampling)
            await forget([server])
            cold = await draw_steps(sglang, forks, sampling)
            ours = await draw_steps(engine, roots, sampling)
            shared = {"dtype": dtype, "temperature": temperature, "top_p": top_p}
            rows.append({"against": "embedded"} | shared | compare(ours, first))
            rows.append({"against": "itself evicted"} | shared | compare(warm, cold))
            say(f"{rows[-2]}\n{rows[-1]}")
    return rows


def main() -> None:
    """Print a table, or one JSON document."""
    parser = BenchmarkParser("sglang_flips", __doc__, "python")
    parser.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the server")
    parser.add_argument("--questions", type=at_least(1), default=16)
    options = parser.parse_args()
    work = measure(options.python, options.dtype, options.questions)
    publish({"rows": to_its_end(work)}, options.json, "tokens that flip", COLUMNS)


if __name__ == "__main__":
    main()
