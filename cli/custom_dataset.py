"""The user's own tasks: problems and answers from a file, a JSON object a line."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.tasks.task import Verdict
from server.reply_text import generic_answer, normalise

SUFFIX = ".jsonl"
GSM8K_MARK = "####"
"""GSM8K's answers end with this mark and the number."""


class DatasetError(ValueError):
    """The file holds no task; the message names the file, the line and what is missing."""


@dataclass(frozen=True, slots=True)
class CustomDataset:
    """Problems with their answers, by the file's name.

    An answer is right if its canonical form is the expected one's, or if ``same`` says that the two
    are equal. Steps are not checked.
    """

    name: str
    answers: Mapping[str, str]
    same: Callable[[str, str], bool] | None = None

    def questions(self, limit: int) -> list[str]:
        """The first ``limit`` problems of the file, in its order."""
        return list(self.answers)[:limit]

    def answer(self, text: str) -> str | None:
        """A reply's answer in canonical form; None if it states none."""
        return generic_answer(text)

    def check(self, question: str, text: str) -> Verdict:
        """Whether a reply's answer is the file's; steps are not judged."""
        reply, expected = self.answer(text), self.answers[question]
        if reply is None:
            return Verdict(False, (), "no answer")
        right = reply == expected or (self.same is not None and self.same(reply, expected))
        return Verdict(right, (), "" if right else f"{reply!r} is not {expected!r}")


def read_dataset(path: Path) -> CustomDataset:
    """Read a file whose lines have the fields ``problem`` (or ``question``) and ``answer``.

    Other fields and blank lines are ignored. Raises DatasetError.
    """
    try:
        lines = path.read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DatasetError(f"{path}: {error}") from error
    answers: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if line.strip():
            where = f"{path}, line {number}"
            problem, answer = _entry(line, where)
            if problem in answers:
                raise DatasetError(f"{where}: problem: the same as on an earlier line")
            answers[problem] = answer
    if not answers:
        raise DatasetError(f"{path}: empty; a JSON object a line is needed")
    return CustomDataset(path.stem, answers, _equal)


def _equal(answer: str, expected: str) -> bool:
    """Whether two answers are mathematically equal."""
    from server.maths import Maths

    return Maths().same(answer, expected)


def _entry(line: str, where: str) -> tuple[str, str]:
    """Parse a line: its problem and the canonical form of its answer. Raises DatasetError."""
    try:
        entry: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise DatasetError(f"{where}: not JSON: {error}") from None
    if not isinstance(entry, dict):
        raise DatasetError(f"{where}: must be an object with the fields problem and answer")
    problem, answer = entry.get("problem", entry.get("question")), entry.get("answer")
    if not isinstance(problem, str) or not problem.strip():
        raise DatasetError(f"{where}: problem = {problem!r}: must be a text")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float):
        raise DatasetError(f"{where}: answer = {answer!r}: must be a text or a number")
    expected = normalise(str(answer).rpartition(GSM8K_MARK)[2])
    if expected is None:
        raise DatasetError(f"{where}: answer = {answer!r}: must not be empty or very long")
    return problem, expected
