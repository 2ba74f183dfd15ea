"""The terminal side of ``hedgerow eval``: an engine of its own, a progress bar, a table."""

from __future__ import annotations

import os
from contextlib import AsyncExitStack
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from cli.evaluation import Evaluation, Trial, evaluate
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.footprint import footprint
from runtime.reward_format import reward_format
from search.tree_json import to_json
from server.assemble import running
from server.settings import Settings
from server.tree_log import TreeLog

FLOAT_BYTES = 4
SMALL_BYTES = 64 << 20
"""Of weights read in a pass, up to which a model has an engine on every core."""
COLUMNS = ("policy", "width", "accuracy", "95 %", "pass@n", "kv total", "tokens", "seconds")


async def run_evaluation(
    wanted: Evaluation, settings: Settings, trees: TreeLog, as_json: bool, engines: int = 1
) -> list[dict[str, Any]]:
    """Run it on engines started for it; print a table unless stdout is for JSON.

    ``engines``: how many; 0 for what suits the models.
    """
    console = Console(stderr=True)
    form = reward_format(settings.reward_format)
    if wanted.share and (settings.reward_model is None or not form.needs_model):
        wanted = replace(wanted, share=False)
        console.print("drawing nothing once for several searches: rewards come with the draws")
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    ) as progress:
        runs = len(wanted.questions) * len(wanted.seeds) * len(wanted.specs)
        bar = progress.add_task(wanted.task.name, total=runs)

        def done(trial: Trial) -> None:
            progress.advance(bar)
            if trees.wanted:
                trees.write(tree_line(wanted, trial))

        async with AsyncExitStack() as started:
            each = [running(own) for own in side_by_side(settings, engines)]
            parts = [await started.enter_async_context(one) for one in each]
            rows = await evaluate(
                replace(wanted, delimiter=parts[0].delimiter),
                [one.engine for one in parts],
                parts[0].text,
                flops=parts[0].flops,
                done=done,
            )
    if not as_json:
        Console().print(_table(wanted, rows))
    return rows


def side_by_side(settings: Settings, engines: int) -> list[Settings]:
    """Settings of ``engines`` engines that share the cores; 0 for one a core where that is faster.

    It is for models so small that several cores gain little on one forward pass of theirs.
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


def tree_line(wanted: Evaluation, trial: Trial) -> dict[str, Any]:
    """One line of ``--trees``; ``hedgerow replay`` reads it."""
    outcome = trial.outcome
    return {
        "task": wanted.task.name,
        "question": trial.question,
        "correct": trial.correct,
        "answer": outcome.answer,
        "stop_reason": outcome.stop_reason.value,
        "spec": outcome.spec.model_dump(),
        "messages": [{"role": "user", "content": trial.question}],
        "tree_digest": outcome.digest,
        "tree": to_json(outcome.tree),
    }


def _table(wanted: Evaluation, rows: list[dict[str, Any]]) -> Table:
    title = f"{wanted.task.name}, {rows[0]['n']} questions"
    if len(wanted.seeds) > 1:
        title += f", {len(wanted.seeds)} seeds"
    if wanted.share:
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
