"""A training run: its log, its checkpoints and its rows."""

import argparse
import json
import random
import signal
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import Tensor

from models.train import checkpoint, parallel, run
from models.train.batches import MicroBatch, Row, load_tokenizer
from models.train.network import new_model
from models.train.policy import token_losses
from models.train.run import Draw, TrainingRun

TOKENIZER = load_tokenizer()
ROW = Row("game24", [5, 6, 7, 8], [6, 7, 8, 9])


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A test's own checkpoint folder; each step is logged; signals and threads are restored."""
    monkeypatch.setattr(checkpoint, "CACHE", tmp_path)
    monkeypatch.setattr(parallel, "CACHE", tmp_path)
    monkeypatch.setattr(run, "LOG_EVERY", 1)
    handler, threads = signal.getsignal(signal.SIGTERM), torch.get_num_threads()
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)
    torch.set_num_threads(threads)


def a_row(_: random.Random, __: int) -> list[Row]:
    """The same row at every step."""
    return [ROW]


def random_rows(rng: random.Random, step: int) -> list[Row]:
    """Random rows: ``step`` + 1 of them."""
    return [ROW._replace(ids=[rng.randrange(900) for _ in ROW.ids]) for _ in range(step + 1)]


def a_run(draw: Draw = a_row, **options: object) -> TrainingRun:
    """A run of a small model, with no training time unless ``minutes`` is given."""
    model = new_model("draft", TOKENIZER, 1)
    settings = {"minutes": 0.0, "rank": 0, "world": 1, "start": "nothing"}
    settings |= {"device": "cpu", "workers": 0} | options

    def losses(batch: MicroBatch) -> Tensor:
        return token_losses(model, batch)

    return TrainingRun("draft", model, draw, losses, lambda _: None, argparse.Namespace(**settings))


def test_a_run_goes_on_from_its_checkpoint(capsys: pytest.CaptureFixture[str]) -> None:
    """It resumes with other minutes too, and every line of the log names the run."""
    first = a_run(minutes=1e-6)
    first.train()
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [(line["run"], line["step"], line["tokens"]) for line in lines] == [
        ("draft", step, 4 * step) for step in range(1, first.step + 1)
    ]
    second = a_run(minutes=0.0)
    assert (second.step, second.tokens) == (first.step, first.tokens)
    second.train()


def test_a_checkpoint_of_another_run_is_refused_by_name(cache: Path) -> None:
    """The run is refused before any process waits for another."""
    a_run().train()
    message = r"draft\.0\.pt is of a run with --start nothing, this one has draft"
    with pytest.raises(checkpoint.OtherRun, match=message):
        a_run(start="draft")
    (cache / "draft.0.pt").rename(cache / "draft.0.old")
    a_run(start="draft").train()


def test_workers_draw_the_same_rows_ahead() -> None:
    """Rows come in the order of steps, from the run's current step, whichever worker is first."""
    here, ahead = a_run(random_rows), a_run(random_rows, workers=2)
    here.step = ahead.step = 3
    for expected, actual in islice(zip(here.drawn(), ahead.drawn(), strict=True), 6):
        assert (expected.tokens, expected.learnt) == (actual.tokens, actual.learnt)
        pairs = zip(expected.batches, actual.batches, strict=True)
        assert all(torch.equal(a.ids, b.ids) and torch.equal(a.labels, b.labels) for a, b in pairs)


def test_time_between_steps_is_time_of_the_run() -> None:
    """Time spent between steps counts towards the run's minutes."""
    run = a_run(minutes=1.0)
    run.spend(60.0)
    run.train_until(60.0)
    assert (run.step, run.clock) == (0, 60.0)
