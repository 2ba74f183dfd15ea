"""A published row as a file that can be run again, the paper's figures beside one's own.

`python -m loadtest.recipe loadtest/recipes/ets-llama-1b-math500.toml --data math500.jsonl [--json]`
runs a recipe as `hedgerow eval` would, where its models fit. A file in `recipes/` has

    title           what it is
    [source]        paper, place (table, section), notes
    [models]        engine, model, profile, reward_model, reward_format
    [data]          name, origin, questions
    [search]        fields of a search, for every row
    [[row]]         further fields of one row; paper: what was published;
                    measured: the columns to be filled
"""

from __future__ import annotations

import asyncio
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from cli.custom_dataset import DatasetError, read_dataset
from cli.evaluation import Evaluation, run_evaluation
from loadtest.options import BenchmarkParser
from loadtest.report import publish
from runtime.profiles import PROFILES
from runtime.reward_format import REWARD_FORMATS
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from server.settings import Settings, SettingsError, load_settings
from server.tree_log import TreeLog

SECTIONS = {
    "source": {"paper", "place", "notes"},
    "models": {"engine", "model", "profile", "reward_model", "reward_format"},
    "data": {"name", "origin", "questions"},
}
COLUMNS = ("policy", "width", "paper", "measured")


class RecipeError(ValueError):
    """The recipe cannot be read or run; the message names the file and what is wrong."""


@dataclass(frozen=True, slots=True)
class Recipe:
    """A recipe's sections. A row holds its own fields, ``paper`` and ``measured``."""

    path: Path
    title: str
    source: Mapping[str, str]
    models: Mapping[str, Any]
    data: Mapping[str, Any]
    search: Mapping[str, Any]
    rows: Sequence[Mapping[str, Any]]

    def fields(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row's fields of a search, those of all rows included."""
        own = {name: value for name, value in row.items() if name not in ("paper", "measured")}
        return {**self.search, **own}

    def unknown(self) -> set[str]:
        """What it names that this version has not, as ``kind: name``."""
        known: dict[str, Sequence[str]] = {
            "engine": get_args(Settings.model_fields["engine"].annotation),
            "profile": list(PROFILES),
            "reward_format": list(REWARD_FORMATS),
        }
        found = {f"{kind}: {self.models[kind]}" for kind in known} - {
            f"{kind}: {name}" for kind, names in known.items() for name in names
        }
        for row in self.rows:
            fields = self.fields(row)
            if fields["policy"] not in POLICIES:
                found.add(f"policy: {fields['policy']}")
            found |= {f"field: {name}" for name in fields if name not in SearchSpec.model_fields}
        return found


def read_recipe(path: Path) -> Recipe:
    """Read a recipe. Raises RecipeError."""
    try:
        found = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise RecipeError(f"{path}: {error}") from error
    missing = {"title", "search", "row", *SECTIONS} - found.keys()
    if missing:
        raise RecipeError(f"{path}: missing: {', '.join(sorted(missing))}")
    for name, allowed in SECTIONS.items():
        extra = found[name].keys() - allowed
        if extra:
            raise RecipeError(f"{path}: {name}: no such key: {', '.join(sorted(extra))}")
    for number, row in enumerate(found["row"], 1):
        if not row.keys() >= {"paper", "measured"} or row["paper"].keys() - row["measured"].keys():
            raise RecipeError(f"{path}: row {number}: each figure of paper needs its measured")
    return Recipe(
        path,
        found["title"],
        found["source"],
        found["models"],
        found["data"],
        found["search"],
        found["row"],
    )


async def run(recipe: Recipe, data: Path) -> list[dict[str, Any]]:
    """Run the rows of a recipe: what was published beside what came out.

    Raises RecipeError, SettingsError and DatasetError.
    """
    unknown = recipe.unknown()
    if unknown:
        raise RecipeError(f"{recipe.path}: not in this version: {', '.join(sorted(unknown))}")
    task = read_dataset(data)
    specs = [SearchSpec.model_validate(recipe.fields(row)) for row in recipe.rows]
    settings = load_settings(
        engine=recipe.models["engine"],
        policy_model=recipe.models["model"],
        reward_model=recipe.models["reward_model"],
        reward_format=recipe.models["reward_format"],
        profile=recipe.models["profile"],
    )
    questions = task.questions(recipe.data["questions"])
    wanted = Evaluation(task, questions, (0,), specs)
    with TreeLog(None) as trees:
        rows = await run_evaluation(wanted, settings, trees, as_json=True)
    return beside(recipe, rows)


def beside(recipe: Recipe, rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Each measured row with the published figures, and the columns of these filled.

    Throughput takes timed runs on an idle machine and stays open.
    """
    rebase = {r["width"]: r["kv_tokens_total"] for r in rows if r["policy"] == "rebase"}
    filled = []
    for published, row in zip(recipe.rows, rows, strict=True):
        base = rebase.get(row["width"])
        columns = {
            "accuracy_percent": round(100 * row["accuracy"], 1),
            "kv_reduction_vs_rebase": base and round(base / row["kv_tokens_total"], 2),
        }
        measured = {name: columns.get(name) for name in published["measured"]}
        filled.append(row | {"paper": published["paper"], "measured": measured})
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
    except (RecipeError, SettingsError, DatasetError) as error:
        sys.exit(f"loadtest.recipe: {error}")
    publish({"rows": rows}, options.json, recipe.title, COLUMNS)


if __name__ == "__main__":
    main()
