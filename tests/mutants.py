"""``make mutants``: small faults put into the modules that everything rests on, one at a time.

What ``[tool.mutmut]`` of pyproject.toml names is mutated; a mutant that no test notices survives.
Those of ``mutants.toml`` may, for the reason given there; any other is printed, and the exit status
is 1. Verdicts are kept in ``mutants/``: what was killed runs again only if its function changes.
"""

from __future__ import annotations

import json
import os
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
UNKNOWN = {"not checked", "check was interrupted by user"}
OTHERS = UNKNOWN | {"killed", "timeout"}
LINE = "{:40}" + "{:>10}" * 5


def modules() -> list[str]:
    """The files that are mutated."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]["only_mutate"]


def accepted() -> set[str]:
    """The mutants that may survive, as ``called`` calls them."""
    tables = tomllib.loads(ACCEPTED.read_text())["survivors"]
    return {mutant for table in tables for mutant in table["mutants"]}


def verdicts(module: str) -> dict[str, int | None]:
    """What became of each mutant of a file: an exit status by mutmut's name; None: not known."""
    meta = VERDICTS / f"{module}.meta"
    return json.loads(meta.read_text())["exit_code_by_key"] if meta.exists() else {}


def called(module: str, mutant: str) -> str:
    """A mutant by its function and what it changes there: mutmut only numbers them."""
    function, owner = names_of(mutant)
    diff = get_diff_for_mutant(mutant, path=module).splitlines()[2:]
    was, becomes = (" ".join(x[1:].strip() for x in diff if x[0] == sign) for sign in "-+")
    place = ".".join(filter(None, (owner, function)))
    return f"{module}, {place}: {was} -> {becomes}"


def survivors(module: str) -> dict[str, str]:
    """Mutmut's name of each that is known to live, and what it is called."""
    lives = [m for m, code in verdicts(module).items() if status_by_exit_code[code] not in OTHERS]
    return {mutant: called(module, mutant) for mutant in lives}


def try_again(module: str, may_live: set[str]) -> None:
    """Forget the verdict on survivors: there may be a test for them by now."""
    meta = VERDICTS / f"{module}.meta"
    if meta.exists():
        known = json.loads(meta.read_text())
        again = {mutant for mutant, name in survivors(module).items() if name not in may_live}
        known["exit_code_by_key"] |= dict.fromkeys(again)
        meta.write_text(json.dumps(known))


def main() -> int:
    """Run what has no verdict; say what lives."""
    may_live, found = accepted(), set[str]()
    for module in modules():
        try_again(module, may_live)
    mutmut = Path(sys.executable).with_name("mutmut")
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}  # mutants' threads would wait for each other
    subprocess.run([mutmut, "run", *sys.argv[1:]], cwd=ROOT, env=environ, check=True)
    print(LINE.format("", "mutants", "killed", "accepted", "survived", "not run"))
    left = 0
    for module in modules():
        alive = list(survivors(module).values())
        found |= set(alive)
        known = Counter(name in may_live for name in alive)
        codes = verdicts(module).values()
        missing = sum(status_by_exit_code[code] in UNKNOWN for code in codes)
        left += missing
        killed = len(codes) - len(alive) - missing
        print(LINE.format(module, len(codes), killed, known[True], known[False], missing))
    for title, names in (
        ("survived", found - may_live),
        ("in mutants.toml, but killed or gone", may_live - found),
    ):
        for name in sorted(names):
            print(f"{title}: {name}")
    return 1 if left or found - may_live else 0


if __name__ == "__main__":
    sys.exit(main())
