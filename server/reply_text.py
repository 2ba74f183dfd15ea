"""Reads a reply's text: where it ends, which part is a thought, and what its answer is."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from models.tasks import TASKS
from search.spec import AnswerRule

if TYPE_CHECKING:
    from server.maths import Maths


def first_stop(text: str, stop: tuple[str, ...], since: int = 0) -> int | None:
    """The start of the stop string that is complete first (of several, the longest); or None.

    It is not the one that begins first, which a reader of the stream could not know yet. The search
    begins at ``since``: text before it was not held back and holds no start of a stop string.
    """
    ends = [(at + len(string), at) for string in stop if (at := text.find(string, since)) >= 0]
    return min(ends)[1] if ends else None


def held_back(text: str, stop: tuple[str, ...]) -> int:
    """How many characters at the end may turn out to be the beginning of a stop string.

    Only the end of the text is searched, as far back as the longest string could begin.
    """
    return max((_overlap(text, string) for string in stop), default=0)


def _overlap(text: str, string: str) -> int:
    """The length of the longest end of the text that is a beginning of ``string``."""
    at = text.find(string[0], max(0, len(text) - len(string) + 1))
    while at >= 0 and not string.startswith(text[at:]):
        at = text.find(string[0], at + 1)
    return 0 if at < 0 else len(text) - at


OPENS = "<think>"
CLOSES = "</think>"


def split_reasoning(text: str, *, opened: bool = False, whole: bool = True) -> tuple[str, str]:
    """A text's thought and its reply, without the tags and the space beside them.

    ``opened``: the prompt has opened the thought. ``whole`` False: more text may come, so an end
    that may become part of a tag is left out; both parts of a longer text then begin with those of
    a shorter one. A thought that is never closed has no reply.
    """
    inside = text
    if not opened:
        bare = text.lstrip()
        if not whole and len(bare) < len(OPENS) and OPENS.startswith(bare):
            return "", ""
        if not bare.startswith(OPENS):
            return "", text
        inside = bare.removeprefix(OPENS)
    thought, end_tag, reply = inside.partition(CLOSES)
    if not end_tag and not whole:
        thought = thought[: len(thought) - held_back(thought, (CLOSES,))]
    return thought.strip(), reply.lstrip()


def opens_reasoning(prompt: Sequence[int], encode: Callable[[str], list[int]]) -> bool:
    """Whether a prompt ends with an open thought, as some chat templates' prompts do."""
    for end in (OPENS, OPENS + "\n"):
        tag = encode(end)
        if tag and list(prompt[-len(tag) :]) == tag:
            return True
    return False


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
    """How answers are extracted from a search's replies (``of``) and compared (``same``).

    ``maths``: compares answers as mathematics; None: by their spelling only.
    """

    of: Callable[[str], str | None]
    maths: Maths | None = None

    @property
    def same(self) -> Callable[[str, str], bool] | None:
        """The test whether two differently spelled answers are equal; None: they never are."""
        return None if self.maths is None else self.maths.same


def answers_to(question: str, rule: AnswerRule) -> Answers:
    """How to extract and compare answers to this question, by ``rule``.

    ``auto``: by the task for a bundled task's question; for others as ``text``, but compared as
    maths if they look like it. ``text``: the boxed or named answer, compared by its spelling.
    ``maths``: the boxed or named answer, else the reply's last number, compared as maths.
    """
    of = answer_of(question) if rule == "auto" else generic_answer
    if rule == "text" or of is not generic_answer:
        return Answers(of)
    from server.maths import Maths

    return Answers(of if rule == "auto" else maths_answer, Maths())


def answer_of(question: str) -> Callable[[str], str | None]:
    """The function that extracts the answer from replies to this question."""
    for task in TASKS.values():
        if task.matches(question):
            return task.answer
    return generic_answer


def generic_answer(text: str) -> str | None:
    r"""The last ``\boxed{...}``, else the last "The (final) answer is ...", normalised; or None."""
    answer = _last_boxed(text)
    if answer is None:
        sentences = ANSWER_SENTENCE.findall(text)
        answer = sentences[-1] if sentences else None
    return normalise(answer) if answer is not None else None


def maths_answer(text: str) -> str | None:
    """The generic answer, else the last number of the reply; or None."""
    answer = generic_answer(text)
    if answer is None and (numbers := ANY_NUMBER.findall(text)):
        answer = normalise(numbers[-1])
    return answer


def normalise(answer: str) -> str | None:
    """One spelling for equal answers: no wrapping, no closing stop, single spaces, 1000 for 1,000.

    None if nothing remains or the answer is too long to be one.
    """
    previous = ""
    while answer != previous:
        previous = answer
        answer = answer.strip().rstrip(".!").strip()
        wrapping = WRAPPED.match(answer)
        if wrapping:
            answer = next(group for group in wrapping.groups() if group is not None)
    answer = THOUSANDS.sub("", " ".join(answer.split()))
    return answer if 0 < len(answer) <= LONGEST_ANSWER else None


def _last_boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{...}`` whose braces balance."""
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
