"""Game of 24: four numbers from 1 to 13. Every solvable puzzle is in exactly one split."""

import random
from functools import cache
from itertools import combinations_with_replacement

from models.tasks import arithmetic
from models.tasks.task import Split, Verdict, split_of

TARGET = 24
COUNT = 4
HIGHEST = 13
CEILING = 120
OTHER_TARGETS = range(20, 31)


@cache
def _puzzles(split: Split) -> tuple[arithmetic.Numbers, ...]:
    every = combinations_with_replacement(range(1, HIGHEST + 1), COUNT)
    return tuple(
        numbers
        for numbers in every
        if split_of(_key(numbers)) == split and arithmetic.reachable(numbers, TARGET)
    )


def _key(numbers: arithmetic.Numbers) -> str:
    return " ".join(map(str, numbers))


class Game24:
    """Use four numbers to make 24 (training also uses other targets, on train numbers only)."""

    name = "game24"
    max_depth = COUNT
    max_step_tokens = 24

    def questions(self, split: Split, limit: int | None = None, seed: int = 0) -> list[str]:
        """All puzzles of the split in an order that the seed decides."""
        puzzles = list(_puzzles(split))
        random.Random(f"game24 {split} {seed}").shuffle(puzzles)
        return [arithmetic.ask(numbers, TARGET) for numbers in puzzles[:limit]]

    def key(self, question: str) -> str:
        """The sorted numbers: other targets over the same numbers share the split."""
        return _key(self._parse(question)[0])

    def matches(self, question: str) -> bool:
        """Four numbers and any target."""
        parsed = arithmetic.parse_question(question)
        return parsed is not None and len(parsed[0]) == COUNT

    def check(self, question: str, text: str) -> Verdict:
        """Judge a whole reply."""
        return arithmetic.check(*self._parse(question), text)

    def answer(self, text: str) -> str | None:
        """The set of equations used."""
        return arithmetic.vote(text)

    def solve(self, question: str, rng: random.Random) -> list[str]:
        """A random derivation among all that reach the target."""
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
        """Nineteen in twenty lessons make 24, the others what a random derivation yields."""
        if rng.random() < 0.95:
            question = arithmetic.ask(rng.choice(_puzzles("train")), TARGET)
            return question, self.solve(question, rng)
        while True:
            numbers = tuple(sorted(rng.choices(range(1, HIGHEST + 1), k=COUNT)))
            if split_of(_key(numbers)) != "train":
                continue
            path = arithmetic.derive(numbers, rng, CEILING)
            if path[-1].result in OTHER_TARGETS:
                target = path[-1].result
                return arithmetic.ask(numbers, target), arithmetic.derivation(path, target)

    def _parse(self, question: str) -> tuple[arithmetic.Numbers, int]:
        parsed = arithmetic.parse_question(question)
        if parsed is None or len(parsed[0]) != COUNT:
            raise ValueError(f"not a game24 question: {question!r}")
        return parsed
