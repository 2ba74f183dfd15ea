"""The recipes: all of them can be read, and what they name exists."""

from __future__ import annotations

from pathlib import Path

import pytest

import loadtest
from loadtest.recipe import Recipe, RecipeError, beside, read_recipe

FOLDER = Path(loadtest.__file__ or ".").parent / "recipes"
RECIPES = sorted(FOLDER.glob("*.toml"))


@pytest.fixture(params=RECIPES, ids=lambda path: path.stem)
def recipe(request: pytest.FixtureRequest) -> Recipe:
    """Each recipe in turn."""
    return read_recipe(request.param)


def test_every_published_table_has_its_recipes() -> None:
    """ETS has six recipes: three models on two data sets."""
    assert [path.stem.split("-")[0] for path in RECIPES] == ["ets"] * 6


def test_a_recipe_says_where_its_figures_stand(recipe: Recipe) -> None:
    """It names paper, place and data, and has figures in every row."""
    assert recipe.source.paper
    assert any(word in recipe.source.place for word in ("table", "section"))
    assert recipe.data.questions > 0
    assert recipe.row
    assert all(row["paper"] for row in recipe.row)


def test_the_headline_row() -> None:
    """Tables 1 and 2: 1.8x less KV and 1.4x throughput at width 256, 52.8 against 52.0 %."""
    recipe = read_recipe(FOLDER / "ets-llemma-34b-math500.toml")
    last = {row["policy"]: row["paper"] for row in recipe.row if row["width"] == 256}
    assert last["rebase"]["accuracy_percent"] == 52.0
    assert last["ets"] == {
        "accuracy_percent": 52.8,
        "kv_reduction_vs_rebase": 1.8,
        "throughput_vs_rebase": 1.4,
    }


WRONG = {
    "no toml": ("=", "=", "Invalid"),
    "section": ("[data]", "[date]", "data: Field required"),
    "key": ("origin =", "origins =", "data.origin: Field required"),
    "profile": ('profile = "', 'profile = "no', "HEDGEROW_PROFILE = 'no"),
    "setting": ("reward_format =", "reward_formats =", "REWARD_FORMATS"),
    "field": ("vote =", "votes =", "votes: Extra inputs are not permitted"),
    "policy": ('policy = "', 'policy = "no', "policy: Input should be"),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_recipe_is_refused(case: str, tmp_path: Path) -> None:
    """The error names the file and what is wrong with it."""
    right, wrong, message = WRONG[case]
    path = tmp_path / "r.toml"
    path.write_text(wrong if right == wrong else RECIPES[0].read_text().replace(right, wrong))
    with pytest.raises(RecipeError, match=r"r\.toml") as error:
        read_recipe(path)
    assert message in str(error.value)


def test_measured_rows_stand_beside_the_published_ones() -> None:
    """KV is compared with REBASE of the same width; a row without times has None for speed."""
    recipe = read_recipe(FOLDER / "ets-llemma-34b-math500.toml")
    rows = [
        {"policy": r["policy"], "width": r["width"], "accuracy": 0.5, "kv_tokens_total": kv}
        for r, kv in zip(recipe.row, (30, 60, 90, 15, 40, 50), strict=True)
    ]
    measured = [row["measured"] for row in beside(recipe, rows)]
    assert measured[3] == {"accuracy_percent": 50.0, "kv_reduction_vs_rebase": 2.0}
    assert measured[5] == {
        "accuracy_percent": 50.0,
        "kv_reduction_vs_rebase": 1.8,
        "throughput_vs_rebase": None,
    }
