"""Countdown: six numbers, all used, one target; five steps with wide branching.

Every set of numbers is in exactly one split. Asked are the sets with an open middle game: random
steps down to three numbers leave the target within reach often enough.
"""

import random
from functools import cache
from itertools import combinations_with_replacement, islice

from models.tasks import arithmetic
from models.tasks.task import Split, Verdict, split_of

COUNT = 6
NUMBERS = range(1, 10)
TARGET = 24
CEILING = 40
ROLLOUTS = 24
OPEN_SHARE = 0.29
"""Of the rollouts to three numbers, so many must keep the target within reach."""


@cache
def _is_open(numbers: arithmetic.Numbers) -> bool:
    rng = random.Random(_key(numbers))
    middles = (arithmetic.derive(numbers, rng, CEILING)[COUNT - 4].left for _ in range(ROLLOUTS))
    alive = sum(arithmetic.reachable(middle, TARGET) for middle in middles)
    return alive >= OPEN_SHARE * ROLLOUTS


def _key(numbers: arithmetic.Numbers) -> str:
    return " ".join(map(str, numbers))


class Countdown:
    """Use six numbers to make a target; every puzzle asked is solvable."""

    name = "countdown"
    max_depth = COUNT
    max_step_tokens = 28

    def questions(self, split: Split, limit: int | None = None, seed: int = 0) -> list[str]:
        """The open puzzles of the split in an order that the seed decides."""
        every = list(combinations_with_replacement(NUMBERS, COUNT))
        random.Random(f"countdown {split} {seed}").shuffle(every)
        asked = (n for n in every if split_of(_key(n)) == split and _is_open(n))
        return [arithmetic.ask(numbers, TARGET) for numbers in islice(asked, limit)]

    def key(self, question: str) -> str:
        """The sorted numbers: other targets over the same numbers share the split."""
        return _key(self._parse(question)[0])

    def matches(self, question: str) -> bool:
        """Six numbers and any target."""
        parsed = arithmetic.parse_question(question)
        return parsed is not None and len(parsed[0]) == COUNT

    def check(self, question: str, text: str) -> Verdict:
        """Judge a whole reply."""
        return arithmetic.check(*self._parse(question), text)

    def answer(self, text: str) -> str | None:
        """The set of equations used."""
        return arithmetic.vote(text)

    def solve(self, question: str, rng: random.Random) -> list[str]:
        """A random derivation that reaches the target."""
        numbers, target = self._parse(question)
        return arithmetic.derivation(arithmetic.solve(numbers, target, rng), target)

    def rival(self, question: str, rng: random.Random) -> str:
        """The same numbers with another target."""
        numbers, target = self._parse(question)
        while True:
            other = arithmetic.derive(numbers, rng, CEILING)[-1].result
            if other != target:
                return arithmetic.ask(numbers, other)

    def lesson(self, rng: random.Random) -> tuple[str, list[str]]:
        """A train puzzle with a derivation in small positive numbers."""
        while True:
            numbers = tuple(sorted(rng.choices(NUMBERS, k=COUNT)))
            if split_of(_key(numbers)) != "train":
                continue
            path = arithmetic.derive(numbers, rng, CEILING)
            if path[-1].result == TARGET:
                return arithmetic.ask(numbers, TARGET), arithmetic.derivation(path, TARGET)

    def _parse(self, question: str) -> tuple[arithmetic.Numbers, int]:
        parsed = arithmetic.parse_question(question)
        if parsed is None or len(parsed[0]) != COUNT:
            raise ValueError(f"not a countdown question: {question!r}")
        return parsed
