"""Rules of the repository: import contracts, sizes, words and documents are checked like code."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
from hypothesis import HealthCheck, core, settings

import search
from tests.promises import page

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "cli",
    "server",
    "search",
    "kvpolicy",
    "hedgerow_sglang",
    "runtime",
    "models",
    "loadtest",
)
SOURCES = sorted(p for package in PACKAGES for p in (ROOT / package).rglob("*.py"))
MOST_FILE_LINES = 400
MOST_FUNCTION_LINES = 60


def lint(folder: Path) -> subprocess.CompletedProcess[str]:
    """Check the import contracts of the source tree in ``folder``."""
    linter = Path(sys.executable).with_name("lint-imports")
    command = [linter, "--no-cache"]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.promise(
    "`search` and `kvpolicy` import no torch, HTTP or clock module, and every package keeps to the "
    "import contracts."
)
def test_imports_run_as_the_design_draws_them() -> None:
    """The import contracts of pyproject.toml hold."""
    process = lint(ROOT)
    assert process.returncode == 0, process.stdout


def test_an_arrow_the_wrong_way_is_caught(tmp_path: Path) -> None:
    """The contracts can fail: a search module that imports torch breaks one of them."""
    for package in PACKAGES:
        (tmp_path / package).mkdir()
        for source in (ROOT / package).rglob("*.py"):
            copy = tmp_path / source.relative_to(ROOT)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_text(source.read_text())
    (tmp_path / "pyproject.toml").write_text((ROOT / "pyproject.toml").read_text())
    with (tmp_path / "search" / "tree.py").open("a") as tree:
        tree.write("\nimport torch\n")
    process = lint(tmp_path)
    assert process.returncode == 1
    assert "search.tree" in process.stdout


def test_packages_are_ours() -> None:
    """The generic package names are this tree's, not those of installed packages."""
    assert Path(search.__file__ or "").parent == ROOT / "search"


def test_no_property_fails_for_taking_long() -> None:
    """Examples have no deadline, since a machine may be busy."""
    assert settings().deadline is None
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_examples_are_fresh_and_can_be_had_again(request: pytest.FixtureRequest) -> None:
    """Examples follow from the seed that the run prints, in CI too; a failure prints how to repeat
    it."""
    assert not settings().derandomize
    assert settings().print_blob
    assert core.global_force_seed == int(request.config.option.hypothesis_seed)


@pytest.mark.slow
def test_every_process_of_a_run_draws_by_one_seed(tmp_path: Path) -> None:
    """Two workers under ``CI=true`` write their seed to a file: it is the one that was printed."""
    probe = (
        "from pathlib import Path\nfrom hypothesis import core\n"
        "def test_seed():\n    Path({!r}).write_text(str(core.global_force_seed))\n"
    )
    shutil.copy(ROOT / "tests" / "conftest.py", tmp_path)
    files = [tmp_path / f"test_{i}.py" for i in range(2)]
    for file in files:
        file.write_text(probe.format(str(file.with_suffix(".seed"))))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", *files]
    environ = {**os.environ, "CI": "true", "PYTHONPATH": str(ROOT)}
    process = subprocess.run(
        command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True
    )
    match = re.search(r"--hypothesis-seed=(\d+)", process.stdout)
    assert match is not None, process.stdout
    assert {file.with_suffix(".seed").read_text() for file in files} == {match[1]}


@cache
def parsed(file: Path) -> ast.Module:
    """A module's syntax tree."""
    return ast.parse(file.read_text())


@pytest.mark.parametrize("source", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_files_and_functions_stay_readable(source: Path) -> None:
    """Files have at most 400 lines and functions at most 60."""
    assert len(source.read_text().splitlines()) <= MOST_FILE_LINES
    long = [
        f"{node.name}: {node.end_lineno - node.lineno + 1} lines"
        for node in ast.walk(parsed(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and node.end_lineno is not None
        and node.end_lineno - node.lineno + 1 > MOST_FUNCTION_LINES
    ]
    assert not long


def private_words() -> Iterator[tuple[list[Path], dict[str, str]]]:
    """The sections of private_words.txt: files, and the words that none of them may use."""
    sections: list[tuple[list[Path], dict[str, str]]] = []
    for line in (ROOT / "tests" / "private_words.txt").read_text().splitlines():
        if line.startswith("["):
            paths = [ROOT / name for name in line.strip("[]").split()]
            assert all(path.exists() for path in paths), f"{line}: not all of it is there"
            files = [f for path in paths for f in ([path] if path.is_file() else path.rglob("*"))]
            sections.append((files, {}))
        elif line and not line.startswith("#"):
            word, _, instead = line.partition(": ")
            sections[-1][1][word] = instead
    return iter(sections)


@cache
def names_in(file: Path) -> set[str]:
    """A file's stem, with a module's identifiers, flags and metrics or a document's code."""
    names = {file.stem}
    if file.suffix == ".py":
        for node in ast.walk(parsed(file)):
            names.update(
                getattr(node, field, None) or "" for field in ("id", "attr", "arg", "name")
            )
            if isinstance(node, ast.Constant) and isinstance(node.value, str):
                names.update(re.findall(r"--[a-z][\w-]+|hedgerow_\w+|HEDGEROW_\w+", node.value))
    elif file.suffix == ".md" and file.name != "upgrading.md":
        names.update(re.findall(r"`([^`\n]+)`", file.read_text()))
    return names


def words_of(name: str) -> set[str]:
    """The words of an identifier in any case: ``DraftTree.row_of`` has draft, tree, row, of."""
    trimmed = re.sub("NotFound|NOT_FOUND", "", name)  # other people's
    apart = re.sub(r"([a-z0-9])([A-Z])", r"\1 \2", trimmed)
    return set(re.findall(r"[a-z]+", apart.lower()))


@pytest.mark.promise(
    "Identifiers, files, flags and metrics use the field's terms and no word listed in "
    "`private_words.txt`."
)
def test_no_private_word_comes_back() -> None:
    """Identifiers, files, flags, metrics and documents have no word of the list."""
    back = [
        f"{file.relative_to(ROOT)}: {name}: {word}; {private[word]} is the word"
        for files, private in private_words()
        for file in files
        if file.suffix in {".py", ".md"}
        for name in names_in(file)
        for word in words_of(name) & private.keys()
    ]
    assert back == []


PARTICIPLES = {
    *("said", "told", "found", "asked", "heard", "wanted", "begun", "shown", "given", "seen"),
    *("took", "taken", "known", "held", "made", "sent", "kept", "drawn", "grown", "ended"),
    "written",
}


def variables(file: Path) -> set[tuple[int, str]]:
    """The line and name of each parameter and local variable of a module's functions."""
    return {
        (node.lineno, node.arg if isinstance(node, ast.arg) else node.id)
        for function in ast.walk(parsed(file))
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        for node in ast.walk(function)
        if isinstance(node, ast.arg)
        or (isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    }


def test_variables_are_nouns() -> None:
    """``reply`` or ``rows``, not ``said`` or ``found``: a name says what the thing is."""
    participles = [
        f"{file.relative_to(ROOT)}:{line}: {name}"
        for file in [*SOURCES, *(ROOT / "tests").rglob("*.py")]
        for line, name in variables(file)
        if name in PARTICIPLES
    ]
    assert participles == []


def test_every_dependency_has_its_reason() -> None:
    """CONTRIBUTING.md names each dependency and constraints.txt pins it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = [r for extra in project["optional-dependencies"].values() for r in extra]
    names = {re.split(r"[=<>\[]", r)[0].lower() for r in project["dependencies"] + extras}
    reasons = (ROOT / "CONTRIBUTING.md").read_text().lower()
    pins = (ROOT / "constraints.txt").read_text().lower().replace("_", "-")
    assert [n for n in sorted(names) if f"`{n}`" not in reasons] == []
    assert [n for n in sorted(names) if f"\n{n}==" not in f"\n{pins}"] == []


def test_the_page_of_promises_is_the_tests() -> None:
    """docs/promises.md is what ``python -m tests.promises`` prints."""
    text = page()
    assert text.count("::") > 100
    assert (ROOT / "docs/promises.md").read_text() == text


def functions_of(source: str) -> dict[str, str]:
    """Each function and method's source on one line, by its name after its class's."""
    owners = [("", ast.parse(source).body)]
    owners += [(f"{x.name}.", x.body) for x in owners[0][1] if isinstance(x, ast.ClassDef)]
    return {
        owner + x.name: " ".join((ast.get_source_segment(source, x) or "").split())
        for owner, body in owners
        for x in body
        if isinstance(x, ast.FunctionDef | ast.AsyncFunctionDef)
    }


def test_mutants_are_of_code_that_is_there() -> None:
    """Mutmut's files exist, and each mutant of mutants.toml changes a line that exists."""
    mutmut = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["mutmut"]
    tests = mutmut["pytest_add_cli_args_test_selection"]
    assert [name for name in tests if not (ROOT / name).is_file()] == []
    code = {name: functions_of((ROOT / name).read_text()) for name in mutmut["only_mutate"]}
    listed = tomllib.loads((ROOT / "tests" / "mutants.toml").read_text())["survivors"]
    for mutant in (mutant for table in listed for mutant in table["mutants"]):
        module, _, change = mutant.partition(", ")
        function, _, lines = change.partition(": ")
        assert lines.partition(" -> ")[0] in code[module].get(function, ""), mutant


def test_version_stands_in_one_place_and_in_the_changelog() -> None:
    """The changelog's newest entry with a number is the version of pyproject.toml."""
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    newest = re.search(r"^## (\d\S*)", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert newest is not None
    assert newest[1] == version
