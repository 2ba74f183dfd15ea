"""``make mutants``: small faults are put into the most important modules, one at a time.

The modules that ``[tool.mutmut]`` of pyproject.toml names are mutated; a mutant that no test
notices survives. Those listed in ``mutants.toml`` may, for the reason given there. Any other is
printed, as is a listed one that is killed or gone, and the exit status is 1. It is 1 too if a
mutant has no verdict: a run that timed out by the clock proves nothing. Verdicts are stored in
``mutants/``: a killed mutant runs again only if its function changes.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

from mutmut.mutation.diff_apply import get_diff_for_mutant
from mutmut.stats import status_by_exit_code
from mutmut.utils.format_utils import orig_function_and_class_names_from_key as names_of

ROOT = Path(__file__).parent.parent
ACCEPTED = Path(__file__).with_suffix(".toml")
VERDICTS = ROOT / "mutants"
ENDLESS = -signal.SIGPROF
"""The exit status of a mutant whose tests used up their CPU time: see ``mutant_run.py``."""

UNKNOWN = {"not checked", "check was interrupted by user", "timeout"}
COLUMNS = ("mutants", "killed", "endless", "listed", "survived", "no verdict")
LINE = "{:32}" + "{:>11}" * len(COLUMNS)


def modules() -> list[str]:
    """The paths of the files that are mutated."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]["only_mutate"]


def accepted() -> set[str]:
    """The mutants that may survive, as ``describe`` names them."""
    tables = tomllib.loads(ACCEPTED.read_text())["survivors"]
    return {mutant for table in tables for mutant in table["mutants"]}


def verdicts(module: str) -> dict[str, int | None]:
    """Each mutant's exit status by mutmut's name, for one file; None where it is not known."""
    meta = VERDICTS / f"{module}.meta"
    return json.loads(meta.read_text())["exit_code_by_key"] if meta.exists() else {}


def describe(module: str, mutant: str) -> str:
    """Describe a mutant by its function and its change, since mutmut only numbers them."""
    function, owner = names_of(mutant)
    diff = get_diff_for_mutant(mutant, path=module).splitlines()[2:]
    was, becomes = (" ".join(x[1:].strip() for x in diff if x[0] == sign) for sign in "-+")
    place = ".".join(filter(None, (owner, function)))
    return f"{module}, {place}: {was} -> {becomes}"


def fate(code: int | None) -> str:
    """The verdict of an exit status: one of COLUMNS, "survived" for listed mutants too."""
    status = status_by_exit_code[code]
    if status in UNKNOWN:
        return "no verdict"
    if code == ENDLESS:
        return "endless"
    return "killed" if status == "killed" else "survived"


def survivors(module: str) -> dict[str, str]:
    """The description of each mutant that survives, by mutmut's name."""
    lives = [mutant for mutant, code in verdicts(module).items() if fate(code) == "survived"]
    return {mutant: describe(module, mutant) for mutant in lives}


def try_again(module: str) -> None:
    """Forget verdicts other than killed: tests may be new, and time limits may have been wrong."""
    meta = VERDICTS / f"{module}.meta"
    if meta.exists():
        verdicts_of_file = json.loads(meta.read_text())
        codes = verdicts_of_file["exit_code_by_key"]
        codes |= {mutant: None for mutant, code in codes.items() if fate(code) != "killed"}
        meta.write_text(json.dumps(verdicts_of_file))


def main() -> int:
    """Run the mutants without a verdict and report the survivors; the exit status."""
    for module in modules():
        try_again(module)
    (VERDICTS / "mutmut-stats.json").unlink(missing_ok=True)  # knows no function's new name
    mutmut = Path(sys.executable).with_name("mutmut")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # mutants' threads would wait for each other
    subprocess.run([mutmut, "run", *sys.argv[1:]], cwd=ROOT, env=environ, check=True)
    return report()


def report() -> int:
    """Print the verdicts of each module and what is wrong with them; the exit status."""
    may_live, alive, unknown = accepted(), set[str](), 0
    print(LINE.format("", *COLUMNS))
    for module in modules():
        codes = verdicts(module).values()
        count = Counter(map(fate, codes))
        count["mutants"] = len(codes)
        unknown += count["no verdict"]
        names = list(survivors(module).values())
        count["listed"] = sum(name in may_live for name in names)
        count["survived"] -= count["listed"]
        alive.update(names)
        print(LINE.format(module, *(count[column] for column in COLUMNS)))
    for title, names in (
        ("survived", alive - may_live),
        ("listed in mutants.toml, but killed or gone", may_live - alive),
    ):
        for name in sorted(names):
            print(f"{title}: {name}")
    return 1 if unknown or alive != may_live else 0


if __name__ == "__main__":
    sys.exit(main())
