"""``hedgerow calibrate``: records calls between search and engine, fits theta, writes the file."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import cli.calibrate
from cli.calibrate import Recorder
from cli.evaluation import Evaluation, evaluate
from cli.main import app
from kvpolicy.fit import together
from kvpolicy.value import load_theta
from models.tasks import TASKS
from search.counters import EngineCounters, Usage
from search.engine import Branch, Sampling, Step
from search.spec import SearchSpec
from server.assemble import RunningModel
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine, dice
from tests.server.conftest import PlainText

QUESTIONS = TASKS["game24"].questions("train", 3, 0)
GOING_BACK = SearchSpec(policy="best_first", width=40, expansions=12, parallel=2, branch=2)
VOCAB = 64
TINY = "--limit 2 --width 40 --set expansions=6 --set enough_answers=40 --seed 1"


class Attentive(ScriptedEngine):
    """Returns steps with attention, with paths of the maximum length, and with unlike entropies."""

    evicted = 0

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Return the scripted steps with the entropy and attention that a real model reports."""
        steps = await super().expand(tree, branches, sampling)
        return [
            replace(step, entropy=dice(step.tokens) % 4 / 2, attention=(dice(b.seed) % 9 / 9,) * 99)
            for b, step in zip(branches, steps, strict=True)
        ]

    async def usage(self) -> Usage:
        """Report ``evicted`` as evicted tokens that searches still held."""
        return Usage(totals=EngineCounters(held_evicted_tokens=self.evicted))


def evaluation_of(specs: Sequence[SearchSpec], at_once: int = 8) -> Evaluation:
    """Return an evaluation of three questions with these specs."""
    return Evaluation(
        TASKS["game24"], QUESTIONS, [5], specs, at_once=at_once, share=False, answers="text"
    )


@pytest.mark.promise(
    "Recording a search for calibration changes no tree, and its rows are the same however many "
    "searches run at once."
)
async def test_recording_changes_no_tree_and_follows_from_the_searches() -> None:
    """Digests and rows are the same, in the same order, however many searches run at once."""
    engine, text = Attentive(), PlainText()
    specs = (GOING_BACK, GOING_BACK.model_copy(update={"policy": "mcts"}))
    plain = await evaluate(evaluation_of(specs), [engine], text)
    recordings = []
    for at_once in (1, 8):
        recorder = Recorder(engine, VOCAB)
        rows = await evaluate(evaluation_of(specs, at_once), [recorder], text)
        assert [row["tree_digest"] for row in rows] == [row["tree_digest"] for row in plain]
        recordings.append(recorder.take())
        assert recorder.take() == []
    assert len(recordings[0]) == len(recordings[1]) == 6
    first, second = map(together, recordings)
    for name in ("v", "u", "a", "target", "weight"):
        np.testing.assert_array_equal(getattr(first, name), getattr(second, name))
    assert set(first.target.tolist()) == {0.0, 1.0}
    assert not np.isnan(first.u).any()
    assert np.all(first.weight >= 1)


async def test_an_aborted_search_says_nothing() -> None:
    """An aborted search leaves no rows: what it would have come back to is unknown."""
    recorder = Recorder(ScriptedEngine(), VOCAB)
    branches = [Branch(0, 0, (1, 2), 3, 9, 1)]
    await recorder.expand("tree", branches, Sampling())
    await recorder.abort("tree")
    assert recorder.take() == []


@pytest.fixture
def attentive(monkeypatch: pytest.MonkeyPatch) -> Attentive:
    """The engine above; the command gets it, and must have asked for attention."""
    engine = Attentive()

    @asynccontextmanager
    async def running(_: Settings, *, attention: bool = False) -> AsyncIterator[RunningModel]:
        assert attention
        yield RunningModel(engine, PlainText())

    monkeypatch.setattr(cli.calibrate, "running", running)
    return engine


def run(out: Path, *options: str, tasks: str = "game24,countdown") -> Result:
    """Run the command on two questions of each task."""
    words = ["calibrate", "--task", tasks, "--out", str(out), *TINY.split(), *options]
    return CliRunner().invoke(app, words)


def test_the_file_is_what_the_engine_reads(tmp_path: Path, attentive: Attentive) -> None:
    """The file has a set for each subset of the three signals, and says where it comes from."""
    invocation = run(tmp_path / "theta.json", "--policy", "best_first,mcts", "--json")
    assert invocation.exit_code == 0, (invocation.output, invocation.exception)
    document: dict[str, Any] = json.loads(invocation.stdout)
    theta = load_theta(tmp_path / "theta.json")
    assert document["theta"] == theta.as_dict()
    assert (theta.mode, theta.signals) == ("exact", "vua")
    assert set(document["loss"]) == set(theta.sets)
    assert document["loss"]["vua"] <= document["loss"][""]
    source = theta.source
    assert (source["tasks"], source["split"]) == (["game24", "countdown"], "train")
    assert (source["policies"], source["searches"]) == (["best_first", "mcts"], 8)
    assert source["search"] == {"width": 40, "expansions": 6, "enough_answers": 40}
    rerun = run(tmp_path / "again.json", "--policy", "best_first,mcts")
    assert rerun.exit_code == 0
    assert "came back" in rerun.stdout
    assert load_theta(tmp_path / "again.json") == theta


def test_searches_that_did_not_keep_all_their_kv_are_refused(
    tmp_path: Path, attentive: Attentive
) -> None:
    """The error names the evicted tokens, and no file is written."""
    attentive.evicted = 7
    invocation = run(tmp_path / "theta.json", "--kv-tokens", "4096")
    assert invocation.exit_code == 1
    assert "HEDGEROW_KV_TOKENS = 4096: 7 tokens of searches were given up" in invocation.stderr
    assert not (tmp_path / "theta.json").exists()


def test_searches_that_leave_nothing_are_nothing_to_fit_to(
    tmp_path: Path, attentive: Attentive
) -> None:
    """A search with a single expansion never comes back to a node, so there are no rows."""
    invocation = run(tmp_path / "theta.json", "--set", "expansions=1")
    assert invocation.exit_code == 1
    assert "nothing to fit to in 4 searches" in invocation.stderr
    assert "Traceback" not in invocation.stderr


@pytest.mark.slow
def test_on_the_bundled_models_in_a_real_engine(tmp_path: Path) -> None:
    """All three signals are recorded for every block, and an engine starts with the file."""
    out = tmp_path / "theta.json"
    invocation = run(out, "--json", tasks="blocksworld")
    assert invocation.exit_code == 0, (invocation.output, invocation.exception)
    theta = load_theta(out)
    assert theta.signals == "vua"
    assert theta.source["rows"] > 10
    invocation = run(tmp_path / "second.json", "--kv-theta", str(out), tasks="blocksworld")
    assert invocation.exit_code == 0, (invocation.output, invocation.exception)
    assert load_theta(tmp_path / "second.json").sets == theta.sets
