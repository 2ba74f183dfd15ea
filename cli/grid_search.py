"""Runs a grid of searches on questions; each tree's row is kept in a file as soon as it is done."""

from __future__ import annotations

import asyncio
import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from cli.custom_dataset import CustomDataset
from cli.evaluation import Graded, answers_of, item_seed, problem_of, search_for
from cli.kept_lines import KeptLines
from cli.shared_samples import SharedSamples
from cli.successive_halving import Cell, tree_key
from runtime.accounting import Flops, no_flops
from runtime.all_of import all_of
from runtime.profiles import PROFILES, Profile
from runtime.text import Text
from search.engine import Engine
from search.outcome import Outcome
from search.spec import AnswerRule, SearchSpec
from search.vote import VOTE_SCORES, AnswerClasses, hold_vote, vote_name
from server.reply_text import Answers


@dataclass(frozen=True, slots=True)
class GridQuestion:
    """A question and the task that extracts and checks its answers."""

    task: Graded
    text: str


@dataclass(frozen=True, slots=True)
class Grid:
    """A grid: every spec is tried once a seed, on as many of ``questions`` as it is worth.

    ``at_once`` questions run concurrently on each engine; ``share``: draw what the trees of a
    question have in common once. ``answers``: how these are compared; ``auto`` is a task's own way.
    """

    specs: Sequence[SearchSpec]
    questions: Sequence[GridQuestion]
    seeds: Sequence[int]
    profile: Profile = PROFILES["chat"]
    at_once: int = 8
    share: bool = True
    answers: AnswerRule = "auto"


@dataclass(frozen=True, slots=True)
class TreeRow:
    """A tree's results: its tokens as in ``usage``, its search's seconds, for each vote whether the
    reply that it chooses is right, and its digest."""

    tokens: int
    seconds: float
    right: dict[str, bool]
    digest: str


ROW = TypeAdapter(TreeRow)


class GridSearch:
    """Runs the grid's trees on engines and keeps their rows.

    ``rows_file``: a file of rows, or None; rows of the same models are taken from it, new ones are
    added. ``done`` is called for every row.
    """

    def __init__(
        self,
        grid: Grid,
        engines: Sequence[Engine],
        text: Text,
        rows_file: Path | None = None,
        *,
        flops: tuple[Flops, ...] = (no_flops, no_flops),
        done: Callable[[], None] = lambda: None,
    ) -> None:
        """Raises ValueError for a file that holds something else."""
        self._grid, self._engines, self._text = grid, engines, text
        self._lines = KeptLines(rows_file, engines[0].capabilities.fingerprint, ROW)
        self._flops, self._on_row = flops, done
        self._trees: dict[str, list[SearchSpec]] = {}
        for spec in grid.specs:
            self._trees.setdefault(tree_key(spec), []).append(spec)
        self._names = map(str, itertools.count())

    async def cells(self, specs: Iterable[SearchSpec], questions: int) -> list[Cell]:
        """Run some specs of the grid on the first ``questions`` questions. If a search fails, the
        others are cancelled and its exception is raised."""
        specs = list(specs)
        keys = list(dict.fromkeys(map(tree_key, specs)))
        places = [(seed, i) for seed in self._grid.seeds for i in range(questions)]
        rooms: asyncio.Queue[Engine] = asyncio.Queue()
        for engine in list(self._engines) * self._grid.at_once:
            rooms.put_nowait(engine)
        rows = await all_of(self._rows(rooms, keys, *place) for place in places)
        return [_cell(spec, [row[tree_key(spec)] for row in rows], questions) for spec in specs]

    async def seconds_alone(self, specs: Iterable[SearchSpec], questions: int) -> dict[str, float]:
        """The mean seconds, by tree, of its searches on the first questions, run one at a time."""
        seconds: dict[str, float] = {}
        for key in dict.fromkeys(map(tree_key, specs)):
            seed = self._grid.seeds[0]
            rows = [
                await self._row(self._engines[0], key, seed, i, alone=True)
                for i in range(min(questions, len(self._grid.questions)))
            ]
            seconds[key] = sum(row.seconds for row in rows) / len(rows)
        return seconds

    async def _rows(
        self, rooms: asyncio.Queue[Engine], keys: Sequence[str], seed: int, i: int
    ) -> dict[str, TreeRow]:
        """The rows of one question's trees by their keys; the widest tree is grown first."""
        engine = await rooms.get()
        shared = SharedSamples(engine, *self._flops) if self._grid.share else engine
        widest_first = sorted(keys, key=lambda key: -self._trees[key][0].width)
        rows = {key: await self._row(shared, key, seed, i) for key in widest_first}
        rooms.put_nowait(engine)
        return rows

    async def _row(
        self, engine: Engine, key: str, run_seed: int, i: int, *, alone: bool = False
    ) -> TreeRow:
        """A tree's row, from the file or by growing the tree now."""
        question = self._grid.questions[i]
        row_key = json.dumps(self._row_fields(question, key, run_seed) | {"alone": alone})
        row = self._lines.get(row_key)
        if row is None:
            row = await self._grow(engine, self._trees[key], question, run_seed)
            self._lines.put(row_key, row)
        self._on_row()
        return row

    def _row_fields(self, question: GridQuestion, key: str, run_seed: int) -> dict[str, Any]:
        """All that a row depends on, except the models."""
        task = question.task
        return {
            "task": task.name,
            "question": question.text,
            "expected": task.answers[question.text] if isinstance(task, CustomDataset) else None,
            "answers": self._grid.answers,
            "profile": self._grid.profile.name,
            "seed": run_seed,
            "search": json.loads(key),
            "votes": [vote_name(spec) for spec in self._trees[key]],
        }

    async def _grow(
        self, engine: Engine, specs: Sequence[SearchSpec], question: GridQuestion, run_seed: int
    ) -> TreeRow:
        """Grow the tree of specs that differ only in their votes."""
        needy = max(specs, key=lambda spec: VOTE_SCORES[vote_name(spec)])
        rule = needy.answers or self._grid.answers
        answers = answers_of(question.task, question.text, rule)
        outcome = await search_for(
            problem_of(question.text, self._grid.profile, self._text),
            needy.model_copy(update={"seed": item_seed(run_seed, question.text)}),
            engine,
            answers,
            f"tune-{next(self._names)}",
        )
        right = await asyncio.to_thread(right_by_vote, outcome, specs, question, answers)
        stats = outcome.stats
        return TreeRow(stats.generated_tokens, stats.seconds, right, outcome.digest)


def right_by_vote(
    outcome: Outcome, specs: Iterable[SearchSpec], question: GridQuestion, answers: Answers
) -> dict[str, bool]:
    """By vote, whether the reply that it would choose from this tree is right."""
    tree, right = outcome.tree, {}
    classes = AnswerClasses(answers.of, answers.same).of(tree)
    for vote in map(vote_name, specs):
        node = hold_vote(tree, vote, classes).chosen
        right[vote] = (
            node is not None and question.task.check(question.text, tree.text(node)).correct
        )
    return right


def _cell(spec: SearchSpec, rows: Sequence[TreeRow], questions: int) -> Cell:
    vote = vote_name(spec)
    tokens = sum(row.tokens for row in rows) / len(rows)
    return Cell(spec, tuple(row.right[vote] for row in rows), questions, tokens)
