"""``hedgerow eval``: measures policies and widths on a task's questions, with their costs."""

from __future__ import annotations

import asyncio
import hashlib
import math
import os
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from cli.anatomy import TreeAnatomy, anatomy_of, anatomy_table, together
from cli.custom_dataset import CustomDataset
from cli.intervals import clustered95
from cli.shared_samples import SharedSamples
from models.tasks.task import Task
from runtime.accounting import Flops, no_flops
from runtime.all_of import all_of
from runtime.embedded.model.config import ModelConfig, footprint
from runtime.profiles import PROFILES, Profile
from runtime.reward_format import reward_format
from runtime.text import Text
from search.context_limit import context_for
from search.controller import search
from search.engine import Engine
from search.outcome import Outcome
from search.problem import Problem
from search.spec import AnswerRule, SearchSpec
from search.stats import SearchStats
from search.tree import combined_digest
from search.tree_json import to_json
from server.assemble import running
from server.prompts import under_profile
from server.reply_text import Answers, answers_to
from server.requested_search import spec_to_run
from server.service import tuned_searches
from server.settings import Settings
from server.tree_log import TreeLog

Graded = Task | CustomDataset
"""A task that extracts a reply's answer and checks a whole reply."""


@dataclass(frozen=True, slots=True)
class Evaluation:
    """An evaluation: every spec is run on every question of ``task``, once for each seed.

    ``at_once`` questions run concurrently on each engine; the specs of a question run one after the
    other, the widest first. ``share``: draw what they have in common once. ``answers``: how these
    are compared; ``auto`` is the task's own way.
    """

    task: Graded
    questions: Sequence[str]
    seeds: Sequence[int]
    specs: Sequence[SearchSpec]
    profile: Profile = PROFILES["chat"]
    at_once: int = 8
    share: bool = True
    answers: AnswerRule = "auto"


@dataclass(frozen=True, slots=True)
class Trial:
    """One spec on one question: the outcome, and whether the reply, or any reply, is right."""

    question: str
    outcome: Outcome
    correct: bool
    any_correct: bool


@dataclass(frozen=True, slots=True)
class TrialScore:
    """What a row needs of a trial, without the tree, which can be freed."""

    correct: bool
    any_correct: bool
    stats: SearchStats
    digest: str
    anatomy: TreeAnatomy


async def evaluate(
    plan: Evaluation,
    engines: Sequence[Engine],
    text: Text,
    *,
    flops: tuple[Flops, ...] = (no_flops, no_flops),
    done: Callable[[Trial], None] = lambda _: None,
) -> list[dict[str, Any]]:
    """Run an evaluation; return a row for each spec, in order. ``done`` is called with each trial.

    ``engines``: of the same models; a question runs on one that has room. ``flops``: of the policy,
    the reward model and embedding, for what a search would cost alone.
    If a search fails, the others are cancelled and its exception is raised.
    """
    rooms: asyncio.Queue[Engine] = asyncio.Queue()
    for engine in list(engines) * plan.at_once:
        rooms.put_nowait(engine)

    async def item_scores(number: int, seed: int, question: str) -> list[TrialScore]:
        engine = await rooms.get()
        shared = SharedSamples(engine, *flops) if plan.share else engine
        scores = await _question(plan, shared, text, f"eval-{number}", seed, question, done)
        rooms.put_nowait(engine)
        return scores

    items = [(seed, question) for seed in plan.seeds for question in plan.questions]
    by_item = await all_of(item_scores(i, *item) for i, item in enumerate(items))
    return [row(plan, spec, [scores[i] for scores in by_item]) for i, spec in enumerate(plan.specs)]


async def _question(
    plan: Evaluation,
    engine: Engine,
    text: Text,
    name: str,
    run_seed: int,
    question: str,
    done: Callable[[Trial], None],
) -> list[TrialScore]:
    """Run all specs on one question; return their scores in order. ``name``: the trees' prefix."""
    problem = problem_of(question, plan.profile, text)
    seed = item_seed(run_seed, question)
    scores: dict[int, TrialScore] = {}
    for i in sorted(range(len(plan.specs)), key=lambda i: -plan.specs[i].width):
        spec = plan.specs[i].model_copy(update={"seed": seed})
        answers = answers_of(plan.task, question, spec.answers or plan.answers)
        outcome = await search_for(problem, spec, engine, answers, f"{name}-{i}")
        trial = judge(plan.task, question, outcome)
        anatomy = anatomy_of(plan.task, question, outcome)
        right = trial.correct, trial.any_correct
        scores[i] = TrialScore(*right, outcome.stats, outcome.digest, anatomy)
        done(trial)
    return [scores[i] for i in range(len(plan.specs))]


def problem_of(question: str, profile: Profile, text: Text) -> Problem:
    """Build a question's prompt for the policy model."""
    messages = under_profile([{"role": "user", "content": question}], profile)
    return Problem(tuple(text.encode_chat(messages)), question, profile.delimiter)


def answers_of(task: Graded, question: str, rule: AnswerRule) -> Answers:
    """How replies' answers are extracted and compared; ``auto`` is a bundled task's own way."""
    bundled = rule == "auto" and not isinstance(task, CustomDataset)
    return Answers(task.answer) if bundled else answers_to(question, rule)


async def search_for(
    problem: Problem, spec: SearchSpec, engine: Engine, answers: Answers, tree_id: str
) -> Outcome:
    """Run a search as a server would for this spec and its seed."""
    return await search(
        problem,
        spec,
        engine,
        tree_id=tree_id,
        answer_of=answers.of,
        same_answer=answers.same,
        clock=time.monotonic,
        context_tokens=context_for(spec, engine.capabilities),
    )


def judge(task: Graded, question: str, outcome: Outcome) -> Trial:
    """Check the chosen reply and every finished one with the task's own checker."""
    right = {
        node.id: task.check(question, outcome.tree.text(node.id)).correct
        for node in outcome.tree.finished()
    }
    correct = outcome.chosen is not None and right.get(outcome.chosen, False)
    return Trial(question, outcome, correct, any(right.values()))


def row(plan: Evaluation, spec: SearchSpec, scores: Sequence[TrialScore]) -> dict[str, Any]:
    """A row of results. Counts, costs and seconds are sums over questions, peaks are maxima.

    With several seeds ``seed`` lists them, sums are over seeds too, and ``n`` still counts the
    questions. With shared draws (``shared``) a row's tokens, calls and FLOPs are those of its
    searches alone, its peak is that of the logical trees, and its seconds are of the shared run.
    ``fallbacks``: rounds planned by a simpler rule. ``anatomy``: what ``together`` returns.
    """
    stats = [score.stats for score in scores]
    peaks = [s.kv_tokens_peak if plan.share else s.engine.kv_tokens_peak for s in stats]
    runs, n, seeds = len(scores), len(plan.questions), plan.seeds
    accuracy = sum(score.correct for score in scores) / runs if runs else 0.0
    pass_at_n = sum(score.any_correct for score in scores) / runs if runs else 0.0
    return {
        "task": plan.task.name,
        "policy": spec.policy,
        "width": spec.width,
        "n": n,
        "seed": seeds[0] if len(seeds) == 1 else list(seeds),
        "accuracy": accuracy,
        "accuracy_ci95": clustered95([score.correct for score in scores], n),
        "pass_at_n": pass_at_n,
        "kv_tokens_total": sum(s.kv_tokens_total for s in stats),
        "kv_tokens_peak": max(peaks, default=0),
        "generated_tokens": sum(s.generated_tokens for s in stats),
        "flops": math.fsum(s.engine.flops for s in stats),
        "model_calls": sum(s.engine.model_calls for s in stats),
        "prm_tokens": sum(s.engine.prm_tokens for s in stats),
        "fallbacks": sum(s.solver_fallbacks + s.embedder_fallbacks for s in stats),
        "policy_seconds": math.fsum(s.policy_seconds for s in stats),
        "seconds": math.fsum(s.seconds for s in stats),
        "precise_goodput": math.fsum(s.precise_goodput for s in stats) / runs if runs else 0.0,
        "shared": plan.share,
        "tree_digest": combined_digest(score.digest for score in scores),
        "anatomy": together([score.anatomy for score in scores], accuracy, pass_at_n),
    }


def item_seed(seed: int, question: str) -> int:
    """The seed of a question: equal for all policies and widths, so that they share samples."""
    digest = hashlib.blake2b(f"{seed}\n{question}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


FLOAT_BYTES = 4
SMALL_BYTES = 64 << 20
"""The most bytes of weights read in a pass for a model that gets an engine on every core."""
COLUMNS = ("policy", "width", "accuracy", "95 %", "pass@n", "kv total", "tokens", "seconds")


async def run_evaluation(
    plan: Evaluation, settings: Settings, trees: TreeLog, as_json: bool, engines: int = 1
) -> list[dict[str, Any]]:
    """Start engines and run an evaluation; print tables unless ``as_json``; return the rows.

    ``engines``: how many to start; 0: what suits the models.
    """
    console = Console(stderr=True)
    if plan.share and not shareable(settings):
        plan = replace(plan, share=False)
        console.print("drawing nothing once for several searches: rewards come with the draws")
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        runs = len(plan.questions) * len(plan.seeds) * len(plan.specs)
        bar = progress.add_task(plan.task.name, total=runs)

        def on_trial(trial: Trial) -> None:
            progress.advance(bar)
            if trees.enabled:
                trees.write(tree_line(plan, trial))

        async with AsyncExitStack() as stack:
            contexts = [running(s) for s in side_by_side(settings, engines)]
            models = [await stack.enter_async_context(context) for context in contexts]
            able = models[0].engine.capabilities
            tuned = tuned_searches(settings, able)
            specs = [spec_to_run(spec, settings, able, tuned) for spec in plan.specs]
            rows = await evaluate(
                replace(plan, specs=specs, profile=PROFILES[settings.profile]),
                [model.engine for model in models],
                models[0].text,
                flops=models[0].flops,
                done=on_trial,
            )
    if not as_json:
        Console().print(_table(plan, rows))
        Console().print(anatomy_table(rows))
    return rows


def shareable(settings: Settings) -> bool:
    """Whether searches can share draws: only if a reward model scores steps apart from drawing."""
    form = reward_format(settings.reward_format)
    return settings.reward_model is not None and form.needs_model


def side_by_side(settings: Settings, engines: int) -> list[Settings]:
    """The settings of ``engines`` engines that share the cores; 0: one a core for small models.

    A small model's forward pass gains little from several cores.
    """
    cores = os.cpu_count() or 1
    if not engines:
        small = settings.engine == "embedded" and not settings.threads and _small(settings)
        engines = cores if small else 1
    if engines == 1:
        return [settings]
    threads = settings.threads or max(1, cores // engines)
    return [settings.model_copy(update={"threads": threads})] * engines


def _small(settings: Settings) -> bool:
    policy = ModelConfig.from_checkpoint(settings.policy_model)
    return footprint(policy, FLOAT_BYTES).weight_bytes <= SMALL_BYTES


def tree_line(plan: Evaluation, trial: Trial) -> dict[str, Any]:
    """The document of one trial for ``--trees``, which ``hedgerow replay`` reads."""
    outcome = trial.outcome
    return {
        "task": plan.task.name,
        "question": trial.question,
        "correct": trial.correct,
        "answer": outcome.answer,
        "stop_reason": outcome.stop_reason.value,
        "spec": outcome.spec.model_dump(),
        "messages": [{"role": "user", "content": trial.question}],
        "tree_digest": outcome.digest,
        "tree": to_json(outcome.tree),
    }


def _table(plan: Evaluation, rows: list[dict[str, Any]]) -> Table:
    title = f"{plan.task.name}, {rows[0]['n']} questions"
    if len(plan.seeds) > 1:
        title += f", {len(plan.seeds)} seeds"
    if plan.share:
        title += "; seconds of a run that draws common samples once"
    table = Table(*COLUMNS, title=title)
    for row in rows:
        low, high = row["accuracy_ci95"]
        table.add_row(
            row["policy"],
            str(row["width"]),
            f"{row['accuracy']:.1%}",
            f"{low:.1%} to {high:.1%}",
            f"{row['pass_at_n']:.1%}",
            f"{row['kv_tokens_total']:,}",
            f"{row['generated_tokens']:,}",
            f"{row['seconds']:.1f}",
        )
    return table
