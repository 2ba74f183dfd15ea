"""Results of searches kept in a file, so that a comparison of hours can go on where it stopped.

A line holds a search's inputs and its result. Only a result of the same spec, item, models, engine
options and search code is used again; all other lines of the file are left alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from pydantic import TypeAdapter

import search
from cli.kept_lines import KeptLines
from loadtest.searches import Item, Method
from search.policies.policy import Round
from search.stats import SearchStats


@dataclass(frozen=True, slots=True)
class Result:
    """A method's result on one item: right or not, the numbers and the digest. The tree itself is
    not kept.

    ``illegal``: whether the chosen reply has a step that the rules forbid, None where there is no
    reply. ``rounds``: its decisions, by which it can be repeated.
    """

    correct: bool
    any_correct: bool
    illegal: bool | None
    stats: SearchStats
    digest: str
    rounds: tuple[Round, ...]


RESULT = TypeAdapter(Result)


def code_of(*packages: ModuleType) -> str:
    """A hash of all Python files of some packages."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(Path(package.__path__[0]).rglob("*.py")):
            digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def kept_results(path: Path | None, fingerprint: str) -> KeptLines[Result]:
    """The results in a file (none if ``path`` is None) from the engine with this fingerprint and
    the present code of ``search``; keyed by ``of_search``."""
    return KeptLines(path, f"{fingerprint} {code_of(search)}", RESULT)


def of_search(item: Item, method: Method) -> str:
    """The key of a search's result: its method's name and spec, and its item."""
    spec = method.spec.model_dump_json(exclude_none=True)
    return f"{method.name} {spec} {item.task} {item.seed} {item.question}"
