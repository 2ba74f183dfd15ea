"""``hedgerow calibrate``: what arborkv's signals weigh, fitted to searches that keep all their KV.

The target is re-entry, weighted by cost: whether a block that a search has left comes back onto its
path, times the tokens that it would take to compute again. (ArborKV, section 5.1, fits to accuracy
instead, since there a block that is given up is lost; here it never is.)
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
"""Policies under which a block that was left can come back."""

AT_ONCE = 4
"""Questions under way: few, so that all of their KV fits."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """What is recorded: every spec on each task's training questions, and where θ goes."""

    tasks: Sequence[tuple[Graded, Sequence[str]]]
    specs: Sequence[SearchSpec]
    seed: int
    out: Path


async def calibrate(plan: Calibration, settings: Settings, as_json: bool) -> dict[str, Any]:
    """Record, fit, write ``out``; what was found. Prints a table unless stdout is for JSON.

    Raises SettingsError for an engine or a KV policy that has no use for θ, where KV was given up
    after all, where nothing was left to come back to, and where ``out`` cannot be written.
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
    """The rows of every search, in the questions' order, and the engine's fingerprint."""
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
    """Before any search is run."""
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
    """What θ was fitted to, for people and for doing it again."""
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
    """Follows every search by what passes between it and the engine, and changes nothing of it."""

    def __init__(self, engine: Engine, vocab: int) -> None:
        """``vocab``: the policy model's tokens, for u."""
        super().__init__(engine)
        self._vocab = vocab
        self._searches: dict[str, ReentryRecorder] = {}
        self._rows: dict[str, ReentryRows] = {}

    def take(self) -> list[ReentryRows]:
        """The rows of each search that has ended since the last call, by their trees' names."""
        rows, self._rows = self._rows, {}
        return [rows[name] for name in sorted(rows, key=lambda name: (len(name), name))]

    def hint(self, tree: str, hint: Hint) -> None:
        """The search moves on."""
        if tree in self._searches:
            search = self._searches[tree]
            search.transition(hint.values, hint.active, hint.dead, hint.outlook)
        super().hint(tree, hint)

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Blocks close, but for those that ended their reply: nothing can follow them."""
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
        """The search is over: its rows can be told."""
        search = self._searches.pop(tree, None)
        if search is not None:
            self._rows[tree] = search.rows()
        return await super().release(tree)

    async def abort(self, tree: str) -> None:
        """What was cut short says nothing of what would have come back."""
        self._searches.pop(tree, None)
        await super().abort(tree)
