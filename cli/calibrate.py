"""``hedgerow calibrate``: what arborkv's signals weigh, fitted to searches that keep all their KV.

The target is re-entry, weighted by cost: whether a block that a search has left comes back onto its
path, times the tokens to compute again then. (ArborKV, section 5.1, fits to accuracy instead,
because there an evicted block is lost; here it is computed again.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from cli.evaluation import Evaluation, Graded, evaluate
from kvpolicy.block_table import confidence_of_entropy
from kvpolicy.fit import ReentryRows, fit, losses, together
from kvpolicy.reentry import ReentryRecorder
from kvpolicy.value import Theta, save_theta
from runtime.embedded.model.config import ModelConfig
from runtime.engine_wrapper import EngineWrapper
from runtime.profiles import PROFILES
from search.counters import Counters
from search.engine import Branch, Engine, Hint, Sampling, Step
from search.spec import SearchSpec
from search.tree import ROOT, Finish
from server.assemble import running
from server.settings import PREFIX, Settings, SettingsError

GO_BACK = ("best_first", "mcts")
"""Policies that may return to a block that the search has left."""

AT_ONCE = 4
"""Questions at once: few, so that all of their KV fits."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """A calibration: every spec is run on each task's questions; θ is written to ``out``."""

    tasks: Sequence[tuple[Graded, Sequence[str]]]
    specs: Sequence[SearchSpec]
    seed: int
    out: Path


async def calibrate(plan: Calibration, settings: Settings, as_json: bool) -> dict[str, Any]:
    """Record searches, fit θ, write ``out``, return the report; print a table unless ``as_json``.

    Raises SettingsError for an engine or a KV policy that does not use θ, if KV was evicted from
    searches, if there is nothing to fit to, and if ``out`` cannot be written.
    """
    _check(plan, settings)
    searches, fingerprint = await record(plan, settings)
    rows = together(searches)
    try:
        theta = fit(rows, "exact", _source(plan, searches, rows, fingerprint))
    except ValueError as error:
        raise SettingsError(
            f"nothing to fit to in {len(searches)} searches ({error}); --limit or --set "
            "expansions=N must be larger"
        ) from None
    try:
        save_theta(theta, plan.out)
    except OSError as error:
        raise SettingsError(f"--out {plan.out}: {error.strerror}") from None
    loss_by_set = losses(theta, rows)
    if not as_json:
        Console().print(_table(theta, loss_by_set, rows))
    return {"out": str(plan.out), "theta": theta.as_dict(), "loss": loss_by_set}


async def record(plan: Calibration, settings: Settings) -> tuple[list[ReentryRows], str]:
    """Run all searches; return each one's rows, in order, and the engine's fingerprint."""
    searches: list[ReentryRows] = []
    columns = (*Progress.get_default_columns(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True)) as progress:
        async with running(settings, attention=True) as parts:
            vocab = ModelConfig.from_checkpoint(settings.policy_model).vocab
            recorder = Recorder(parts.engine, vocab)
            for task, questions in plan.tasks:
                bar = progress.add_task(task.name, total=len(questions) * len(plan.specs))
                batch = Evaluation(
                    task,
                    questions,
                    [plan.seed],
                    plan.specs,
                    profile=PROFILES[settings.profile],
                    at_once=AT_ONCE,
                    share=False,
                )
                await evaluate(
                    batch, [recorder], parts.text, done=lambda _, bar=bar: progress.advance(bar)
                )
                searches += recorder.take()
            usage = await parts.engine.usage()
            fingerprint = parts.engine.capabilities.fingerprint
    if usage.totals.held_evicted_tokens:
        raise SettingsError(
            f"{PREFIX}KV_TOKENS = {settings.kv_tokens}: {usage.totals.held_evicted_tokens} tokens "
            "of searches were given up; more is needed to keep all"
        )
    return searches, fingerprint


def _check(plan: Calibration, settings: Settings) -> None:
    """Check tasks, engine and KV policy before any search is run. Raises SettingsError."""
    if not plan.tasks:
        raise SettingsError("--task: none; at least one is needed")
    for name, required in (("engine", "embedded"), ("kv_policy", "arborkv")):
        value = getattr(settings, name)
        if value != required:
            reason = f"{required!r} is needed, which goes by what is fitted"
            raise SettingsError(f"{PREFIX}{name.upper()} = {value!r}: {reason}")


def _source(
    plan: Calibration, searches: Sequence[ReentryRows], rows: ReentryRows, fingerprint: str
) -> dict[str, Any]:
    """A description of what θ was fitted to, enough to repeat the fit."""
    shape = plan.specs[0]
    return {
        "target": "re-entry in hindsight x tokens",
        "tasks": [task.name for task, _ in plan.tasks],
        "split": "train",
        "questions": [len(questions) for _, questions in plan.tasks],
        "policies": [spec.policy for spec in plan.specs],
        "search": shape.model_dump(exclude_defaults=True, exclude={"policy", "seed"}),
        "seed": plan.seed,
        "searches": len(searches),
        "rows": len(rows.target),
        "reentered": round(float(rows.target.mean()), 4) if len(rows.target) else 0.0,
        "engine": fingerprint,
    }


def _table(theta: Theta, loss_by_set: dict[str, float], rows: ReentryRows) -> Table:
    title = f"{len(rows.target)} rows, {rows.target.mean():.1%} came back; loss in nats a row"
    table = Table("signals", "bias", *"vua", "loss", title=title)
    for name, (bias, *slopes) in theta.sets.items():
        coefficients = dict(zip(name, slopes, strict=True))
        cells = [
            f"{coefficients[signal]:.3f}" if signal in coefficients else "" for signal in "vua"
        ]
        loss = f"{loss_by_set[name]:.4f}" if name in loss_by_set else ""
        table.add_row(name or "none", f"{bias:.3f}", *cells, loss)
    return table


class Recorder(EngineWrapper):
    """Records every search from its calls of the engine, without changing them."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        """``vocab``: the size of the policy's vocabulary, for the signal u."""
        super().__init__(engine)
        self._vocab = vocab
        self._searches: dict[str, ReentryRecorder] = {}
        self._rows: dict[str, ReentryRows] = {}

    def take(self) -> list[ReentryRows]:
        """The rows of each search that has ended since the last call, sorted by tree name."""
        rows, self._rows = self._rows, {}
        return [rows[name] for name in sorted(rows, key=lambda name: (len(name), name))]

    def hint(self, tree: str, hint: Hint) -> None:
        """Record the search's new path and values."""
        if tree in self._searches:
            search = self._searches[tree]
            search.transition(hint.values, hint.active, hint.dead, hint.outlook)
        super().hint(tree, hint)

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Record a closed block for each step, unless it ends its reply: no step follows it."""
        if tree not in self._searches:
            search = self._searches[tree] = ReentryRecorder(len(branches[0].tokens))
            search.transition({}, [ROOT], ())
        steps = await super().expand(tree, branches, sampling)
        search = self._searches[tree]
        for branch, step in zip(branches, steps, strict=True):
            if step.finish is not Finish.END:
                assert step.entropy is not None, "the embedded engine knows it"
                confidence = confidence_of_entropy(step.entropy, self._vocab)
                boundary = branch.node, branch.parent, len(step.tokens), confidence, step.attention
                search.boundary(*boundary)
        return steps

    async def release(self, tree: str) -> Counters:
        """Keep the rows of the search, which is over."""
        search = self._searches.pop(tree, None)
        if search is not None:
            self._rows[tree] = search.rows()
        return await super().release(tree)

    async def abort(self, tree: str) -> Counters:
        """Drop the recording: an aborted search does not show what would have come back."""
        self._searches.pop(tree, None)
        return await super().abort(tree)
