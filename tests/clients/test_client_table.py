"""docs/clients.md lists the programs that are run and the versions that are installed."""

from __future__ import annotations

import json
import re
from pathlib import Path

from tests.clients.environment import HERE, NODE, PINS, PROGRAMS

PAGE = Path(__file__).parents[2] / "docs" / "clients.md"
ROW = re.compile(r"^\|[^|]+\| (\S+) (\S+) \|[^|]+\| `(\w+\.\w+)` \| (CI|nightly) \|$", re.M)


def versions_of(program: str, schedule: str) -> dict[str, str]:
    """Return the packages that a program runs with, and their versions."""
    if program.endswith(".mjs"):
        return json.loads((NODE / "package.json").read_text())["dependencies"]
    name = "ci" if schedule == "CI" else program.removeprefix("with_").removesuffix(".py")
    lines = (PINS / f"{name}.txt").read_text().split()
    return dict(line.split("==") for line in lines if "==" in line)


def test_every_row_has_its_program() -> None:
    """Every program has a row and every row a program; a test runs it, at the row's version."""
    rows = ROW.findall(PAGE.read_text())
    programs = {program for _, _, program, _ in rows}
    assert programs == {path.name for path in PROGRAMS.iterdir() if path.is_file()}
    tests = {
        "CI": (HERE / "test_clients.py").read_text(),
        "nightly": (HERE / "test_nightly_clients.py").read_text(),
    }
    for package, version, program, schedule in rows:
        assert versions_of(program, schedule)[package] == version, program
        name = program.removeprefix("with_").removesuffix(".py")
        assert f'"{program}"' in tests[schedule] or f'"{name}"' in tests[schedule], program
