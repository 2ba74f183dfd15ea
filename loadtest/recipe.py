"""A published row as a file that can be run again, the paper's figures beside one's own.

`python -m loadtest.recipe loadtest/recipes/ets-llama-1b-math500.toml --data math500.jsonl [--json]`
runs a recipe as `hedgerow eval` would, where its models fit. A file in `recipes/` has

    title           what it is
    [source]        paper, place (table, section), notes
    [models]        settings by their names: engine, policy_model, profile, reward_model, ...
    [data]          name, origin, questions
    [search]        fields of a search, for every row
    [[row]]         further fields of one row; paper: what was published
"""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, PositiveInt, ValidationError

from cli.custom_dataset import DatasetError, read_dataset
from cli.evaluation import Evaluation, run_evaluation
from loadtest.options import BenchmarkParser
from loadtest.report import publish
from search.spec import SearchSpec
from server.settings import Settings, load_settings
from server.tree_log import TreeLog

COLUMNS = ("policy", "width", "paper", "measured")


class RecipeError(ValueError):
    """The recipe cannot be read; the message names the file and what is wrong."""


class Section(BaseModel):
    """A part of the file, with no other keys."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Source(Section):
    """Where the figures were published."""

    paper: str
    place: str
    notes: str = ""


class Data(Section):
    """The questions, and how many of them."""

    name: str
    origin: str
    questions: PositiveInt


class Recipe(Section):
    """A whole file."""

    title: str
    source: Source
    models: dict[str, Any]
    data: Data
    search: dict[str, Any]
    row: list[dict[str, Any]]

    @property
    def settings(self) -> Settings:
        """The settings of the models. Raises SettingsError."""
        return load_settings(**self.models)

    @property
    def specs(self) -> list[SearchSpec]:
        """The search of each row. Raises ValidationError."""
        return [
            SearchSpec.model_validate(self.search | {k: v for k, v in row.items() if k != "paper"})
            for row in self.row
        ]


def read_recipe(path: Path) -> Recipe:
    """Read a recipe and check its settings and specs. Raises RecipeError."""
    try:
        recipe = Recipe.model_validate(tomllib.loads(path.read_text(encoding="utf-8")))
        _ = recipe.settings, recipe.specs
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise RecipeError(f"{path}: {place}: {first['msg']}") from error
    except (OSError, ValueError) as error:
        raise RecipeError(f"{path}: {error}") from error
    return recipe


async def run(recipe: Recipe, data: Path) -> list[dict[str, Any]]:
    """Run the rows of a recipe: what was published beside what came out.

    Raises DatasetError.
    """
    task = read_dataset(data)
    evaluation = Evaluation(task, task.questions(recipe.data.questions), (0,), recipe.specs)
    with TreeLog(None) as trees:
        rows = await run_evaluation(evaluation, recipe.settings, trees, as_json=True)
    return beside(recipe, rows)


def beside(recipe: Recipe, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each measured row with the published figures and ours of the same names.

    Throughput would need timed runs on an idle machine: it stays None.
    """
    rebase = {r["width"]: r["kv_tokens_total"] for r in rows if r["policy"] == "rebase"}
    filled = []
    for published, row in zip(recipe.row, rows, strict=True):
        base, paper = rebase.get(row["width"]), published["paper"]
        ours = {
            "accuracy_percent": round(100 * row["accuracy"], 1),
            "kv_reduction_vs_rebase": base and round(base / row["kv_tokens_total"], 2),
        }
        filled.append(row | {"paper": paper, "measured": {name: ours.get(name) for name in paper}})
    return filled


def main() -> None:
    """Print a table, or one JSON document with ``--json``."""
    parser = BenchmarkParser("recipe", __doc__)
    parser.add_argument("recipe", type=Path, help="a file of loadtest/recipes")
    parser.add_argument("--data", type=Path, required=True, help="problems and answers, .jsonl")
    options = parser.parse_args()
    try:
        recipe = read_recipe(options.recipe)
        rows = asyncio.run(run(recipe, options.data))
    except (RecipeError, DatasetError) as error:
        sys.exit(f"loadtest.recipe: {error}")
    publish({"rows": rows}, options.json, recipe.title, COLUMNS)


if __name__ == "__main__":
    main()
