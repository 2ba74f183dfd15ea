"""Options that benchmarks share, and plans made of them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest

from loadtest.options import BenchmarkParser, at_least, listed, planned


@dataclass(frozen=True)
class Plan:
    questions: int = 7
    seed: int = 0
    kept_in: Path | None = None


def parser() -> BenchmarkParser:
    """A parser with some of the shared options."""
    benchmark_parser = BenchmarkParser("some", "What?", "limit", "keep", seed="of luck")
    benchmark_parser.add_argument("--width", type=listed(int))
    benchmark_parser.add_argument("--least", type=at_least(0))
    return benchmark_parser


def test_what_was_given_takes_the_place_of_the_plans() -> None:
    """Other fields keep the plan's values; 0 replaces a value; options that are no field do not."""
    options = parser().parse_args(["--limit", "3", "--width", "2", "--least", "0"])
    assert (options.json, options.width, options.least) == (False, [2], 0)
    assert planned(Plan(seed=5), options) == Plan(3, 5)
    assert planned(Plan(seed=5), parser().parse_args(["--seed", "0"])) == Plan(7, 0)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--limit", "0"], "loadtest.some: --limit: 0: must be at least 1"),
        (["--least", "-1"], "loadtest.some: --least: -1: must be at least 0"),
        (["--least", "x"], "loadtest.some: --least: invalid number value: 'x'"),
        (
            ["--keep", "/nowhere/x"],
            "loadtest.some: --keep: /nowhere/x: there is no folder /nowhere",
        ),
        (["--quick"], "loadtest.some: unrecognized arguments: --quick"),
    ],
)
def test_a_wrong_one_is_a_line(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """The message is a line on stderr, and the exit status is 2, as argparse has it."""
    with pytest.raises(SystemExit) as error:
        parser().parse_args(words)
    assert error.value.code == 2
    assert capsys.readouterr() == ("", f"{message}\n")


def test_an_option_may_be_described_anew() -> None:
    """The help text of ``--seed`` is the parser's own."""
    assert "of luck" in parser().format_help()
