"""Which answer a reply gives: by the question's own task, or by what replies usually look like."""

from __future__ import annotations

import re
from collections.abc import Callable

from models.tasks import TASKS

ANSWER_SENTENCE = re.compile(
    r"\banswer\s*(?:is\s*:?|:)\s*((?:(?!\banswer\b)[^\n])+)", re.IGNORECASE
)
WRAPPED = re.compile(
    r"^(?:\\(?:text|mathrm|mathbf|boxed)\{(.*)\}|\$(.*)\$|\\\((.*)\\\)|\*\*(.*)\*\*)$"
)
THOUSANDS = re.compile(r"(?<=\d),(?=\d{3}\b)")
LONGEST_ANSWER = 500


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
