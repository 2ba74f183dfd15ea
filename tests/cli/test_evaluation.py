"""``hedgerow eval``: rows with known outcomes, and intervals worked by hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cli.accuracy_plot import plot
from cli.evaluation import Evaluation, Trial, evaluate, item_seed, side_by_side
from cli.intervals import clustered95, wilson95
from models.tasks.task import Split, Verdict
from search.engine import Branch, EngineDown
from search.spec import SearchSpec
from search.tree import combined_digest
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine, answer_of, decode
from tests.server.conftest import PlainText

KEYS = {
    "task",
    "policy",
    "width",
    "n",
    "seed",
    "accuracy",
    "accuracy_ci95",
    "pass_at_n",
    "kv_tokens_total",
    "kv_tokens_peak",
    "generated_tokens",
    "flops",
    "model_calls",
    "prm_tokens",
    "fallbacks",
    "policy_seconds",
    "seconds",
    "precise_goodput",
    "shared",
    "tree_digest",
    "anatomy",
}


class Echo:
    """Questions that are numbers; a reply is right if it repeats its number."""

    name = "echo"

    def questions(self, split: Split, limit: int | None = None, seed: int = 0) -> list[str]:
        """Return the numbers from 0 to ``limit`` - 1, as text; 8 numbers by default."""
        return [str(i) for i in range(limit or 8)]

    def check(self, question: str, text: str) -> Verdict:
        """Judge a reply right if its last line gives the number of the question."""
        right = answer_of(text) == question
        return Verdict(right, (right,), "" if right else "another number")

    def first_illegal(self, question: str, text: str) -> int | None:
        """Return the index of the first step ``bad``, which breaks the rules."""
        steps = text.strip().split("\n\n")
        return steps.index("bad") if "bad" in steps else None

    def answer(self, text: str) -> str | None:
        """Return the answer on the last line."""
        return answer_of(text)


def evaluation(
    widths: tuple[int, ...] = (1, 4), share: bool = True, seeds: tuple[int, ...] = (5,)
) -> Evaluation:
    """Return an evaluation of eight questions by two policies."""
    specs = [
        SearchSpec.model_validate({"policy": policy, "width": width})
        for policy in ("best_of_n", "rebase")
        for width in widths
    ]
    return Evaluation(Echo(), Echo().questions("test", 8), seeds, specs, at_once=3, share=share)


def number_of(branch: Branch) -> int:
    """Return the question's number, read from the prompt."""
    return int(decode(branch.tokens).split("\n")[0].removeprefix("user: "))


async def test_accuracy_counts_the_chosen_replies() -> None:
    """Only even questions are right: 4 of 8, at every width and for both policies."""
    engine = ScriptedEngine(say=lambda b: f"The answer is {number_of(b) // 2 * 2}.")
    rows = await evaluate(evaluation(), [engine], PlainText())
    assert [(r["policy"], r["width"]) for r in rows] == [
        ("best_of_n", 1),
        ("best_of_n", 4),
        ("rebase", 1),
        ("rebase", 4),
    ]
    for row in rows:
        assert row.keys() == KEYS
        assert (row["n"], row["accuracy"], row["pass_at_n"]) == (8, 0.5, 0.5)
        assert row["accuracy_ci95"][0] < 0.5 < row["accuracy_ci95"][1]


async def test_pass_at_n_counts_any_finished_reply() -> None:
    """The right first child is scored 0 and never chosen: its siblings agree on a wrong answer."""

    def say(branch: Branch) -> str:
        return f"The answer is {number_of(branch) if branch.child == 0 else 99}."

    engine = ScriptedEngine(say=say, score_of=lambda texts: 0.9 if "99" in texts[-1] else 0.0)
    rows = await evaluate(evaluation((4,)), [engine], PlainText())
    assert [(row["accuracy"], row["pass_at_n"]) for row in rows] == [(0.0, 1.0), (0.0, 1.0)]


async def test_sharing_draws_changes_no_tree() -> None:
    """Accuracy, tokens and digests are those of searches that share nothing."""
    keys = ("accuracy", "pass_at_n", "generated_tokens", "kv_tokens_total", "tree_digest")
    engine, apart = ScriptedEngine(), ScriptedEngine()
    trials: list[Trial] = []
    shared = await evaluate(evaluation(), [engine], PlainText(), done=trials.append)
    alone = await evaluate(evaluation(share=False), [apart], PlainText())
    assert [[r[k] for k in keys] for r in shared] == [[r[k] for k in keys] for r in alone]
    assert sum(map(len, engine.expanded)) < sum(map(len, apart.expanded))
    assert len(trials) == 8 * 4


@pytest.mark.promise(
    "An evaluation gives the same rows on one engine and on several, except for times."
)
async def test_engines_side_by_side_change_no_row() -> None:
    """Every engine gets questions, and but for times the rows are those of one engine."""
    engines = [ScriptedEngine(), ScriptedEngine()]
    alone = await evaluate(evaluation(), [ScriptedEngine()], PlainText())
    dealt = await evaluate(evaluation(), engines, PlainText())
    assert all(engine.expanded for engine in engines)
    for row, dealt_row in zip(alone, dealt, strict=True):
        seconds = {"seconds": 0.0, "policy_seconds": 0.0, "precise_goodput": 0.0}
        assert row | seconds == dealt_row | seconds


async def test_the_digest_of_a_row_is_over_all_its_trees() -> None:
    """The digest takes trees in the questions' order, whichever finished first."""
    trials: list[Trial] = []
    rows = await evaluate(evaluation((2,)), [ScriptedEngine()], PlainText(), done=trials.append)
    digests = {t.question: t.outcome.digest for t in trials if t.outcome.spec.policy == "rebase"}
    assert rows[1]["tree_digest"] == combined_digest(digests[str(i)] for i in range(8))


async def test_one_failure_ends_the_evaluation() -> None:
    """No row covers fewer questions than it says."""
    with pytest.raises(EngineDown):
        await evaluate(evaluation(), [ScriptedEngine(fail_at=7)], PlainText())


def test_wilson_by_hand() -> None:
    """8 of 10: (0.8 + 0.19207) / 1.38415 -/+ 0.22657; the bounds stay within [0, 1]."""
    low, high = wilson95(0.8, 10)
    assert low == pytest.approx(0.4902, abs=1e-4)
    assert high == pytest.approx(0.9433, abs=1e-4)
    assert wilson95(0.0, 5)[0] == 0.0
    assert wilson95(1.0, 5)[1] == 1.0
    assert wilson95(0.0, 0) == [0.0, 1.0]


def test_seeds_count_for_as_much_as_they_tell() -> None:
    """Two questions, two seeds, by hand.

    Where answers follow the question alone, (1, 0) twice: the means 1 and 0 vary by (1/4 + 1/4) / 4
    = 1/8, independent trials by 1/16, so 4 trials count as 2. Means of 1/2 and 1/2 do not vary: all
    4 count. If all are right the variance is unknown, and the number of questions counts.
    """
    assert clustered95([True, False, True, False], 2) == wilson95(0.5, 2)
    assert clustered95([True, False, False, True], 2) == wilson95(0.5, 4)
    assert clustered95([True] * 4, 2) == wilson95(1.0, 2)
    assert clustered95([], 0) == [0.0, 1.0]


@given(st.lists(st.booleans(), min_size=1, max_size=40))
def test_one_seed_is_wilson(right: list[bool]) -> None:
    """With one seed the interval is Wilson's over the questions."""
    share = sum(right) / len(right)
    assert clustered95(right, len(right)) == pytest.approx(wilson95(share, len(right)))


async def test_several_seeds_are_their_runs_together() -> None:
    """Counters are sums over the runs, accuracy is their mean, ``n`` counts questions once."""
    alone = [
        await evaluate(evaluation(seeds=(s,)), [ScriptedEngine()], PlainText()) for s in (5, 6)
    ]
    both = await evaluate(evaluation(seeds=(5, 6)), [ScriptedEngine()], PlainText())
    for first, second, row in zip(*alone, both, strict=True):
        assert (row["n"], row["seed"], first["seed"]) == (8, [5, 6], 5)
        assert row["accuracy"] == (first["accuracy"] + second["accuracy"]) / 2
        for key in ("kv_tokens_total", "generated_tokens", "model_calls"):
            assert row[key] == first[key] + second[key]
        assert first["tree_digest"] != second["tree_digest"]


def test_item_seeds_differ_by_question_and_seed_and_fit() -> None:
    """A question has one seed for all policies, within the range that a spec takes."""
    seeds = {item_seed(seed, question) for seed in range(4) for question in "abcd"}
    assert len(seeds) == 16
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert item_seed(1, "a") == item_seed(1, "a")


@pytest.mark.parametrize(
    ("fields", "engines_option", "engines", "threads"),
    [
        ({}, 0, 4, 1),  # small bundled models: one engine per core
        ({}, 2, 2, 2),
        ({}, 1, 1, 0),
        ({}, 8, 8, 1),
        ({"threads": 3}, 0, 1, 3),  # a number of threads means one engine
        ({"threads": 3}, 2, 2, 3),
        ({"engine": "sglang", "policy_urls": ("http://127.0.0.1:1",)}, 0, 1, 0),
    ],
)
def test_engines_share_the_cores(
    monkeypatch: pytest.MonkeyPatch,
    fields: dict[str, Any],
    engines_option: int,
    engines: int,
    threads: int,
) -> None:
    """On four cores; a number of threads that is set is kept."""
    monkeypatch.setattr("os.cpu_count", lambda: 4)
    copies = side_by_side(Settings(**fields), engines_option)
    assert [settings.threads for settings in copies] == [threads] * engines


def test_a_plot_is_fit_for_print(tmp_path: Path) -> None:
    """Text stays text, policies differ by marker and dashes, equal rows give equal bytes."""
    rows = [
        {"task": "t", "n": 9, "seed": 0, "policy": policy, "width": width}
        | {"accuracy": 0.5, "accuracy_ci95": [0.3, 0.7], "kv_tokens_total": 100 * width}
        for policy in ("rebase", "ets")
        for width in (1, 4)
    ]
    for name in ("a.svg", "b.svg", "a.pdf"):
        plot(rows, tmp_path / name)
    picture = (tmp_path / "a.svg").read_text()
    assert picture == (tmp_path / "b.svg").read_text()
    assert picture.count("stroke-dasharray") >= 1
    assert ">rebase</text>" in picture
    assert b"/Type3" not in (tmp_path / "a.pdf").read_bytes()
