"""ETS against REBASE on SGLang, with models of a real size: for a machine with a GPU.

`python -m loadtest.sglang_gpu [--shape qwen2.5-1.5b] [--speculate] [--draft] [--load] [--json]`
starts two servers, of a policy and of a reward model, and grows the same questions by both
policies, some at once. Weights are random: they cost what trained ones do, and say nothing, so
steps have a fixed length and trees little in common. `--shape sprig` takes the bundled models. With
`--speculate` all is done once more with the next steps drawn early, where the policy waits for
scores. With `--draft` all is done once more with a draft model beside the policy (`STANDALONE`, see
`hedgerow plan`): random too, so what it wins is next to nothing and what it costs is seen; the
bundled draft is a real one.

With `--load` the document also has `load`, the rows of `loadtest.sglang` on this device (what a
round sends and takes as SGLang schedules, `overlap`, and with each token known before the next one
is drawn, which whole chains need; small pools, with the bundled models), and `rewards`, those of
`loadtest.sglang_rewards`, as SGLang computes and with `--enable-deterministic-inference`.

`--all` is all of it; `--dry-run` is what of it runs on a CPU, as small as it gets.
"""

from __future__ import annotations

import argparse
import shlex
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from cli.kv_split_plan import draft_args
from loadtest.budget_weight import spec_for
from loadtest.on_sglang import engine_on, started, to_its_end
from loadtest.options import BenchmarkParser
from loadtest.report import publish, say_row
from loadtest.searches import Item, Method, grow_all, items_of
from loadtest.sglang import PAIRS, Place, rounds
from loadtest.sglang_pools import pools
from loadtest.sglang_rewards import measure as score_ways
from models.bundled import SPRIG_FOLDER
from models.deepen import WEIGHTS
from runtime.sglang.launched_server import LaunchedServer
from search.outcome import Outcome
from search.spec import PolicyName
from search.tree import combined_digest
from server.settings import load_settings

TASK = "blocksworld"
POLICIES: tuple[PolicyName, ...] = ("rebase", "ets")
WAYS = ("speculate", "draft")
STEP_TOKENS, DEPTH = 32, 8
COLUMNS = (
    *("shape", "way", "policy", "width", "n", "kv_tokens_total", "kv_reduction_vs_rebase"),
    *("problems_per_second", "throughput_vs_rebase", "precise_goodput"),
)


NO_OVERLAP = "--disable-overlap-schedule"
OVERLAP = {"cuda": (True, False), "cpu": (False,)}
"""Whether SGLang draws a token before the last one is known; on a CPU it is launched without."""
REPEATABLE = {"cuda": ((), ("--enable-deterministic-inference",)), "cpu": ((),)}
"""SGLang has no arithmetic on a CPU that does not depend on the batch."""
SMALLEST = {"shape": "tiny", "width": 8, "limit": 2, "at_once": 2, "kv_tokens": 20_000}
"""Options of a run that only shows that everything runs."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2's sizes; the vocabulary is the bundled tokenizer's."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int


SHAPES = {
    "qwen2.5-1.5b": Shape(1536, 28, 12, 2, 8960),
    "qwen2.5-0.5b": Shape(896, 24, 14, 2, 4864),
    "tiny": Shape(64, 2, 4, 2, 96),
}
DRAFTS = {"qwen2.5-1.5b": "qwen2.5-0.5b", "qwen2.5-0.5b": "tiny", "tiny": "tiny"}


@dataclass(frozen=True, slots=True)
class GpuModels:
    """Checkpoints of a policy, a reward model and a draft, and the spec fields of the searches."""

    policy: Path
    prm: Path
    draft: Path
    fields: dict[str, Any]


def random_checkpoint(folder: Path, shape: Shape, seed: int) -> Path:
    """Write a Qwen2 with random weights, in bfloat16, that reads the bundled tokenizer's ids."""
    bundled = SPRIG_FOLDER / "policy"
    bundled_config = Qwen2Config.from_pretrained(bundled)
    config = Qwen2Config(
        vocab_size=bundled_config.vocab_size,
        hidden_size=shape.hidden,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        intermediate_size=shape.ffn,
        max_position_embeddings=bundled_config.max_position_embeddings,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=bundled_config.eos_token_id,
        pad_token_id=bundled_config.pad_token_id,
    )
    torch.manual_seed(seed)
    Qwen2ForCausalLM(config).bfloat16().save_pretrained(folder)
    for path in bundled.iterdir():
        if path.name not in (WEIGHTS, "config.json"):
            shutil.copy(path, folder / path.name)
    return folder


def models_of(shape: str, folder: Path) -> GpuModels:
    """The bundled models, or random ones that are written below ``folder``."""
    if shape == "sprig":
        return GpuModels(SPRIG_FOLDER / "policy", SPRIG_FOLDER / "prm", SPRIG_FOLDER / "draft", {})
    policy = random_checkpoint(folder / "policy", SHAPES[shape], 1)
    prm = random_checkpoint(folder / "prm", SHAPES[shape], 2)
    draft = random_checkpoint(folder / "draft", SHAPES[DRAFTS[shape]], 3)
    steps = {"step_tokens": STEP_TOKENS, "max_step_tokens": STEP_TOKENS, "max_depth": DEPTH}
    return GpuModels(policy, prm, draft, steps)


async def run(options: argparse.Namespace) -> dict[str, Any]:
    """Measure what the options ask for; the whole document."""
    document = await measure(options)
    if options.load:
        document |= {"load": await load(options), "rewards": await rewards(options)}
    return document


async def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Measure the policies; a row for each, in each way that is asked for."""
    items = items_of(TASK, "test", options.limit, 0)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        models = models_of(options.shape, Path(folder))
        for way in ("plain", *(way for way in WAYS if getattr(options, way))):
            servers = _servers(models, options, way)
            on = engine_on(servers[:1], servers[1:], speculate=way == "speculate")
            async with started(servers), on as engine:
                runs = {}
                for policy in POLICIES:
                    spec = spec_for(policy, options.width, TASK).model_copy(update=models.fields)
                    await grow_all(engine, items[:1], Method(f"warm {policy}", spec), 1)
                    start = time.perf_counter()
                    outcomes = await grow_all(engine, items, Method(policy, spec), options.at_once)
                    runs[policy] = outcomes, time.perf_counter() - start
            rows += _rows({"shape": options.shape, "way": way}, runs, items)
    return {"rows": rows, "device": options.device, "at_once": options.at_once}


async def load(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of ``loadtest.sglang``, but for the replay, which needs no device."""
    rows, device = [], options.device
    with tempfile.TemporaryDirectory() as folder:
        models = models_of(options.shape, Path(folder))
        for overlap in OVERLAP[device]:
            place = _place(models, options, () if overlap else (NO_OVERLAP,))
            cells = await rounds(place, options.dry_run, 1 if options.dry_run else PAIRS)
            rows += [{"shape": options.shape, "overlap": overlap} | row for row in cells]
    async for row in pools(options.python, quick=options.dry_run, device=device):
        rows.append({"shape": "sprig", "overlap": OVERLAP[device][0]} | row)
    return rows


async def rewards(options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of ``loadtest.sglang_rewards``, of the bundled models."""
    rows, items = [], items_of("game24", "test", options.limit, 0)
    for flags in REPEATABLE[options.device]:
        ways = await score_ways(options.python, items, 8, device=options.device, args=flags)
        rows += [{"flags": " ".join(flags)} | row for row in ways]
    return rows


def _place(models: GpuModels, options: argparse.Namespace, args: Sequence[str]) -> Place:
    """The models on the device; ``args``: more of SGLang's options for the policy's server."""
    where, room = (options.python, options.device), options.kv_tokens
    return Place(*where, models.policy, models.prm, models.fields, room, tuple(args))


def _servers(models: GpuModels, options: argparse.Namespace, way: str) -> list[LaunchedServer]:
    """The policy's and the reward model's server, not started. A drafting one draws unseeded."""
    flags: Sequence[str] = ()
    if way == "draft":
        settings = {"HEDGEROW_DRAFT": "scheduled", "HEDGEROW_DRAFT_MODEL": str(models.draft)}
        flags = shlex.split(draft_args(load_settings(settings), options.width))
    policy, reward = _place(models, options, flags).servers()
    policy.options = replace(policy.options, seeds=way != "draft", schedules=way == "speculate")
    return [policy, reward]


def _rows(
    about: dict[str, Any],
    runs: dict[PolicyName, tuple[list[Outcome], float]],
    items: Sequence[Item],
) -> list[dict[str, Any]]:
    """A row per policy, compared with the first."""
    rows: list[dict[str, Any]] = []
    for policy, (outcomes, seconds) in runs.items():
        stats = [outcome.stats for outcome in outcomes]
        row = about | {
            "policy": policy,
            "width": outcomes[0].spec.width,
            "n": len(items),
            "kv_tokens_total": sum(each.kv_tokens_total for each in stats),
            "problems_per_second": len(items) / seconds,
            "precise_goodput": sum(each.precise_goodput for each in stats) / len(stats),
            "tree_digest": combined_digest(outcome.digest for outcome in outcomes),
        }
        first = rows[0] if rows else row
        row["kv_reduction_vs_rebase"] = first["kv_tokens_total"] / row["kv_tokens_total"]
        row["throughput_vs_rebase"] = row["problems_per_second"] / first["problems_per_second"]
        rows.append(row)
        say_row(row, COLUMNS)
    return rows


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    options = chosen(_parser().parse_args())
    document = to_its_end(run(options))
    publish(document, options.json, "ETS on SGLang at a real size", COLUMNS)


def chosen(options: argparse.Namespace) -> argparse.Namespace:
    """The options, with ``--all`` and ``--dry-run`` spelt out."""
    options.load |= options.all or options.dry_run
    options.speculate |= options.all or options.dry_run
    options.draft = (options.draft or options.all) and not options.dry_run
    if options.dry_run:
        vars(options).update(SMALLEST, device="cpu")
    return options


def _parser() -> BenchmarkParser:
    parser = BenchmarkParser("sglang_gpu", __doc__, "python")
    parser.add_argument("--shape", choices=("sprig", *SHAPES), default="qwen2.5-1.5b")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--limit", type=int, default=32, help="questions")
    parser.add_argument("--at-once", type=int, default=8, help="searches side by side")
    parser.add_argument("--kv-tokens", type=int, default=200_000, help="of each server")
    parser.add_argument("--speculate", action="store_true", help="once more with early steps")
    parser.add_argument("--draft", action="store_true", help="once more with a draft model")
    parser.add_argument("--load", action="store_true", help="rounds, pools and rewards as well")
    parser.add_argument("--all", action="store_true", help="all of these")
    parser.add_argument("--dry-run", action="store_true", help="what runs on a CPU, and little")
    return parser


if __name__ == "__main__":
    main()
