"""Which answer a reply gives: by the question's own task, or by what replies usually look like."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.tasks import TASKS
from search.spec import AnswerRule

if TYPE_CHECKING:
    from server.maths import Maths

ANSWER_SENTENCE = re.compile(
    r"\banswer\s*+(?:is\s*+:?+|:)\s*+((?:(?!\banswer\b)[^\n])+)", re.IGNORECASE
)
WRAPPED = re.compile(
    r"^(?:\\(?:text|mathrm|mathbf|boxed)\{(.*)\}|\$(.*)\$|\\\((.*)\\\)|\*\*(.*)\*\*)$"
)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
ANY_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:/\d+)?")
LONGEST_ANSWER = 500


@dataclass(frozen=True, slots=True)
class Answers:
    """How the answers of one search are read off its replies (``of``), and compared (``same``).

    ``maths``: what compares them, where that is not their spelling alone.
    """

    of: Callable[[str], str | None]
    maths: Maths | None = None

    @property
    def same(self) -> Callable[[str, str], bool] | None:
        """Whether two answers that are spelled differently are equal; None: they never are."""
        return None if self.maths is None else self.maths.same


def answers_to(question: str, rule: AnswerRule) -> Answers:
    """The answers of one search for this question, by ``rule``.

    ``auto``: a bundled task's question as the task says, any other one's answers as ``text`` reads
    them, compared as maths where they look like it. ``text``: the boxed or named answer, as it is
    spelled. ``maths``: the boxed or named answer, else the reply's last number, compared as maths.
    """
    of = answer_of(question) if rule == "auto" else generic_answer
    if rule == "text" or of is not generic_answer:
        return Answers(of)
    from server.maths import Maths

    return Answers(of if rule == "auto" else maths_answer, Maths())


def answer_of(question: str) -> Callable[[str], str | None]:
    """The function that extracts a reply's answer, for replies to this question."""
    for task in TASKS.values():
        if task.matches(question):
            return task.answer
    return generic_answer


def generic_answer(text: str) -> str | None:
    r"""The last ``\boxed{...}``, else the last "The (final) answer is ...", normalised; or None."""
    found = _last_boxed(text)
    if found is None:
        sentences = ANSWER_SENTENCE.findall(text)
        found = sentences[-1] if sentences else None
    return normalise(found) if found is not None else None


def maths_answer(text: str) -> str | None:
    """The generic answer, else the last number of the reply; or None."""
    found = generic_answer(text)
    if found is None and (numbers := ANY_NUMBER.findall(text)):
        found = normalise(numbers[-1])
    return found


def normalise(answer: str) -> str | None:
    """One spelling for equal answers: no wrapping, no closing stop, single spaces, 1000 for 1,000.

    None if nothing remains or the answer is too long to be one.
    """
    previous = ""
    while answer != previous:
        previous = answer
        answer = answer.strip().rstrip(".!").strip()
        wrapped = WRAPPED.match(answer)
        if wrapped:
            answer = next(group for group in wrapped.groups() if group is not None)
    answer = THOUSANDS.sub("", " ".join(answer.split()))
    return answer if 0 < len(answer) <= LONGEST_ANSWER else None


def _last_boxed(text: str) -> str | None:
    r"""What stands in the last ``\boxed{...}`` whose braces balance."""
    start = text.rfind("\\boxed{")
    if start < 0:
        return None
    inside = start + len("\\boxed{")
    depth = 1
    for i in range(inside, len(text)):
        depth += {"{": 1, "}": -1}.get(text[i], 0)
        if depth == 0:
            return text[inside:i]
    return None
