"""The options of benchmarks: shared ones are defined once, and a wrong one gives one line."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from loadtest.turns import CLOCKS

Plan = TypeVar("Plan")
PYTHON = Path(".venv-sglang/bin/python")
"""The Python of the environment that ``make sglang-env`` makes."""


def at_least(least: int) -> Callable[[str], int]:
    """A parser of integers of at least ``least``."""

    def read(text: str) -> int:
        value = int(text)
        if value < least:
            raise argparse.ArgumentTypeError(f"{text}: must be at least {least}")
        return value

    read.__name__ = "number"  # argparse's name for it in errors
    return read


def listed(kind: type, choices: Collection[str] = ()) -> Callable[[str], list[Any]]:
    """A parser of values separated by commas: from ``choices``, or numbers above 0."""

    def read(text: str) -> list[Any]:
        try:
            values = list(dict.fromkeys(kind(part.strip()) for part in text.split(",")))
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text}: must be numbers, by commas") from None
        for value in values:
            if choices and value not in choices:
                raise argparse.ArgumentTypeError(f"{value}: known are {', '.join(choices)}")
            if not choices and not 0 < value < float("inf"):
                raise argparse.ArgumentTypeError(f"{text}: must be values above 0")
        return values

    return read


def output_file(text: str) -> Path:
    """Parse the path of a file to be written: its folder must exist."""
    path = Path(text)
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text}: there is no folder {path.parent}")
    return path


SHARED: Mapping[str, Mapping[str, Any]] = {
    "quick": {"action": "store_true", "help": "few questions; takes minutes"},
    "limit": {"type": at_least(1), "dest": "questions", "help": "number of questions"},
    "searches": {"type": at_least(1), "help": "number of searches"},
    "repeats": {"type": at_least(1), "help": "repeats of each timed measurement"},
    "seed": {"type": at_least(0), "help": "random seed of questions and searches"},
    "threads": {"type": at_least(0), "help": "compute threads; 0: the fastest number"},
    "clock": {"choices": CLOCKS, "help": "cpu: for a machine that is busy with other work"},
    "seconds": {
        "type": float,
        "help": "start no cell after this many seconds, and list those left out",
    },
    "keep": {
        "type": output_file,
        "dest": "kept_in",
        "metavar": "FILE",
        "help": "reuse results in this file and append new ones, to resume an interrupted run",
    },
    "python": {"type": Path, "default": PYTHON, "help": "Python of SGLang's environment"},
}
"""The shared options, which mean the same in every benchmark."""


class BenchmarkParser(argparse.ArgumentParser):
    """Reads the options of ``python -m loadtest.NAME``; a wrong one ends it with one line."""

    def __init__(self, name: str, doc: str | None, *shared: str, **described: str) -> None:
        """``doc``: the module's own; ``shared``: names of SHARED; ``described``: more of them
        with help texts of their own. Every benchmark also has ``--json``."""
        super().__init__(
            prog=f"python -m loadtest.{name}",
            description=doc,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        self._name = name
        self.add_argument("--json", action="store_true", help="print one JSON document to stdout")
        for option in (*shared, *described):
            override = {"help": described[option]} if option in described else {}
            self.add_argument(f"--{option}", **{**SHARED[option], **override})

    def by_commas(
        self, option: str, dest: str, choices: type | Collection[str], of: str = ""
    ) -> None:
        """Add an option that takes a list: of ``choices``, or of numbers if that is a type."""
        reader = listed(choices) if isinstance(choices, type) else listed(str, choices)
        says = f"{of} (separated by commas)" if of else "separated by commas"
        self.add_argument(f"--{option}", type=reader, dest=dest, help=says)

    def error(self, message: str) -> NoReturn:
        """End the program, status 2."""
        self.exit(2, f"loadtest.{self._name}: {message.removeprefix('argument ')}\n")


def planned(plan: Plan, options: argparse.Namespace) -> Plan:
    """The plan with the options that were given in place of its fields of the same names."""
    names = {field.name for field in fields(plan)} & vars(options).keys()  # type: ignore[arg-type]
    changes = {name: value for name in names if (value := getattr(options, name)) is not None}
    return replace(plan, **changes)  # type: ignore[type-var]
