"""``hedgerow eval``: policies and widths on a task's questions, with what they cost."""

from __future__ import annotations

import asyncio
import hashlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from models.tasks.task import Task
from search.controller import Problem, search
from search.digest import combined_digest
from search.engine import Engine
from search.outcome import Outcome
from search.spec import SearchSpec
from server.room import context_for
from server.service import ChatText
from server.shared_draws import Flops, SharedDraws, free

Z95 = 1.959963984540054
"""The 97.5 % point of the normal distribution."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What is evaluated: every spec on every question of ``task``.

    ``at_once`` questions run concurrently; the specs of a question run one after the other, the
    widest first. ``share``: what they have in common is drawn once.
    """

    task: Task
    questions: Sequence[str]
    seed: int
    specs: Sequence[SearchSpec]
    delimiter: str = "\n\n"
    at_once: int = 8
    share: bool = True


@dataclass(frozen=True, slots=True)
class Trial:
    """One spec on one question: its outcome; whether the reply is right, and whether any one is."""

    question: str
    outcome: Outcome
    correct: bool
    any_correct: bool


async def evaluate(
    wanted: Evaluation,
    engine: Engine,
    text: ChatText,
    *,
    flops: tuple[Flops, ...] = (free, free),
    done: Callable[[Trial], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """A row for each spec, in the order given; ``done`` hears of every trial.

    ``flops``: of the policy, the reward model and embedding, for what a search would cost alone.
    Raises what the first search that fails raises, ending the others.
    """
    room = asyncio.Semaphore(wanted.at_once)

    async def one(number: int, question: str) -> list[Trial]:
        async with room:
            shared = SharedDraws(engine, *flops) if wanted.share else engine
            return await _question(wanted, shared, text, number, question, done)

    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(one(i, q)) for i, q in enumerate(wanted.questions)]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    by_question = [task.result() for task in tasks]
    return [
        row(wanted, spec, [trials[i] for trials in by_question])
        for i, spec in enumerate(wanted.specs)
    ]


async def _question(
    wanted: Evaluation,
    engine: Engine,
    text: ChatText,
    number: int,
    question: str,
    done: Callable[[Trial], None],
) -> list[Trial]:
    """All specs on one question, in the specs' order."""
    prompt = tuple(text.encode_chat([{"role": "user", "content": question}]))
    problem = Problem(prompt, question, wanted.delimiter)
    seed = item_seed(wanted.seed, question)
    trials: dict[int, Trial] = {}
    for i in sorted(range(len(wanted.specs)), key=lambda i: -wanted.specs[i].width):
        outcome = await search(
            problem,
            wanted.specs[i].model_copy(update={"seed": seed}),
            engine,
            tree_id=f"eval-{number}-{i}",
            answer_of=wanted.task.answer,
            clock=time.monotonic,
            context_tokens=context_for(wanted.specs[i], engine.capabilities),
        )
        trials[i] = judge(wanted.task, question, outcome)
        done(trials[i])
    return [trials[i] for i in range(len(wanted.specs))]


def judge(task: Task, question: str, outcome: Outcome) -> Trial:
    """Check the chosen reply and every finished one with the task's own checker."""
    right = {
        node.id: task.check(question, outcome.tree.text(node.id)).correct
        for node in outcome.tree.finished()
    }
    correct = outcome.chosen is not None and right[outcome.chosen]
    return Trial(question, outcome, correct, any(right.values()))


def row(wanted: Evaluation, spec: SearchSpec, trials: Sequence[Trial]) -> dict[str, Any]:
    """The published keys. Counts, costs and seconds are sums over questions, peaks the largest.

    With shared draws a row's tokens, calls and FLOPs are those of its searches alone, its peak is
    that of the logical trees, and its seconds are of the shared run.
    """
    stats = [trial.outcome.stats for trial in trials]
    n, right = len(trials), sum(trial.correct for trial in trials)
    held = [s.kv_tokens_peak if wanted.share else s.engine.kv_tokens_peak for s in stats]
    return {
        "task": wanted.task.name,
        "policy": spec.policy,
        "width": spec.width,
        "n": n,
        "seed": wanted.seed,
        "accuracy": right / n if n else 0.0,
        "accuracy_ci95": wilson95(right, n),
        "pass_at_n": sum(trial.any_correct for trial in trials) / n if n else 0.0,
        "kv_tokens_total": sum(s.kv_tokens_total for s in stats),
        "kv_tokens_peak": max(held, default=0),
        "generated_tokens": sum(s.generated_tokens for s in stats),
        "flops": math.fsum(s.engine.flops for s in stats),
        "model_calls": sum(s.engine.model_calls for s in stats),
        "prm_tokens": sum(s.engine.prm_tokens for s in stats),
        "policy_seconds": math.fsum(s.policy_seconds for s in stats),
        "seconds": math.fsum(s.seconds for s in stats),
        "precise_goodput": math.fsum(s.precise_goodput for s in stats) / n if n else 0.0,
        "tree_digest": combined_digest(trial.outcome.digest for trial in trials),
    }


def wilson95(right: int, n: int) -> list[float]:
    """Wilson's 95 % interval of a share, as fractions [low, high]; [0, 1] without any trial."""
    if n == 0:
        return [0.0, 1.0]
    share, z2 = right / n, Z95 * Z95
    centre = (share + z2 / (2 * n)) / (1 + z2 / n)
    reach = Z95 * math.sqrt(share * (1 - share) / n + z2 / (4 * n * n)) / (1 + z2 / n)
    low = 0.0 if right == 0 else centre - reach
    high = 1.0 if right == n else centre + reach
    return [low, high]


def item_seed(seed: int, question: str) -> int:
    """A question's own seed: the same for every policy and width, so that they share samples."""
    digest = hashlib.blake2b(f"{seed}\n{question}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
