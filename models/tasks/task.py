"""What a task is: questions with a split, a teacher, and an exact checker of derivations.

A derivation is a list of steps, one a paragraph (`STEP_BREAK` between them); the last step
starts with `ANSWER_PREFIX`. Everything here is pure and needs the standard library only.
"""

import hashlib
import random
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol

Split = Literal["train", "dev", "test"]

STEP_BREAK = "\n\n"
ANSWER_PREFIX = "The answer is "


@dataclass(frozen=True)
class Verdict:
    """What the checker says about one reply.

    `steps[i]` holds when steps 0..i are legal and a correct completion still exists after step
    i; for the answer step it equals `correct`. `reason` names the first thing that went wrong.
    """

    correct: bool
    steps: tuple[bool, ...]
    reason: str


class Task(Protocol):
    """One family of puzzles, generated, solved and checked exactly."""

    @property
    def name(self) -> str:
        """What clients and commands call it."""
        ...

    @property
    def max_depth(self) -> int:
        """The most steps a correct reply can have, the answer step included."""
        ...

    @property
    def max_step_tokens(self) -> int:
        """The most tokens of a legal step, by the bundled tokenizer."""
        ...

    def questions(self, split: Split, limit: int | None = None, seed: int = 0) -> list[str]:
        """The first `limit` questions of a split, the same on every call with the same seed."""
        ...

    def key(self, question: str) -> str:
        """The canonical puzzle behind a question; its hash decides the split."""
        ...

    def matches(self, question: str) -> bool:
        """Is this text a question of this task?"""
        ...

    def check(self, question: str, text: str) -> Verdict:
        """Judge a whole reply, step by step."""
        ...

    def first_illegal(self, question: str, text: str) -> int | None:
        """The first step, counted from 0, that does not follow from those before; None if all do.

        A step that follows but leads nowhere does not count: the steps after it are checked too.
        """
        ...

    def answer(self, text: str) -> str | None:
        """The class a reply votes for, read off its text alone; None without an answer line."""
        ...

    def solve(self, question: str, rng: random.Random) -> list[str]:
        """A random correct derivation, the answer step included."""
        ...

    def rival(self, question: str, rng: random.Random) -> str:
        """A question on the same material with another goal: its derivations mislead here."""
        ...

    def lesson(self, rng: random.Random) -> tuple[str, list[str]]:
        """A training question with a derivation, drawn together (cheaper than `solve`)."""
        ...


class StepChecker(ABC):
    """The part of a task that checks a reply step by step."""

    def check(self, question: str, text: str) -> Verdict:
        """Judge a whole reply, step by step."""
        return self._verdict(question, split_steps(text), hopeful=True)

    def first_illegal(self, question: str, text: str) -> int | None:
        """The first step that does not follow from those before; None if all do, up to a right
        answer line."""
        steps = split_steps(text)
        answer_lines = [i for i, step in enumerate(steps) if step.startswith(ANSWER_PREFIX)]
        end = answer_lines[0] + 1 if answer_lines else len(steps)
        holds = self._verdict(question, steps[:end], hopeful=False).steps
        return None if all(holds) else holds.index(False)

    @abstractmethod
    def _verdict(self, question: str, steps: list[str], *, hopeful: bool) -> Verdict:
        """Judge the steps of a reply; with `hopeful`, a legal step that leads nowhere does not
        hold."""


def split_of(key: str) -> Split:
    """The split of a canonical puzzle: 78 % train, 8 % dev, 14 % test, by SHA-256."""
    bucket = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") % 100
    if bucket < 78:
        return "train"
    return "dev" if bucket < 86 else "test"


def stream(
    label: str, draw: Callable[[random.Random], tuple[str, str] | None], limit: int
) -> list[str]:
    """Distinct questions out of an endless stream that `label` seeds, cut at `limit`.

    `draw` gives a puzzle's key and question, or None for one that does not belong to the split.
    """
    rng, questions = random.Random(label), {}
    while len(questions) < limit:
        entry = draw(rng)
        if entry is not None:
            questions.setdefault(*entry)
    return list(questions.values())


def split_steps(text: str) -> list[str]:
    """The steps of a reply; surrounding blank space carries no meaning."""
    return text.strip().split(STEP_BREAK)


def answer_step(text: str) -> str | None:
    """The last step's text after `ANSWER_PREFIX`, without its full stop; None for another step."""
    last = split_steps(text)[-1]
    if not last.startswith(ANSWER_PREFIX):
        return None
    return last.removeprefix(ANSWER_PREFIX).removesuffix(".")


def fail(steps: list[str], good: int, reason: str) -> Verdict:
    """A verdict whose first `good` steps hold and whose others do not."""
    return Verdict(False, (True,) * good + (False,) * (len(steps) - good), reason)
