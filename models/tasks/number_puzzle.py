"""Number puzzles: so many numbers, all used, one target. Game of 24 and countdown are two of them.

Every set of numbers is in exactly one split, whatever the target.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import islice

from models.tasks import arithmetic
from models.tasks.task import Split, Verdict, split_of

TARGET = 24


def key(numbers: arithmetic.Numbers) -> str:
    """What decides the split: the sorted numbers, without the target."""
    return " ".join(map(str, numbers))


def taught(
    rng: random.Random, choices: Sequence[int], count: int, ceiling: int, targets: Sequence[int]
) -> tuple[str, list[str]]:
    """A train puzzle made backwards: a random derivation that ends in one of the targets."""
    while True:
        numbers = tuple(sorted(rng.choices(choices, k=count)))
        if split_of(key(numbers)) != "train":
            continue
        path = arithmetic.derive(numbers, rng, ceiling)
        target = path[-1].result
        if target in targets:
            return arithmetic.ask(numbers, target), arithmetic.derivation(path, target)


@dataclass(frozen=True)
class NumberPuzzle:
    """Use `count` numbers to make a target.

    `candidates` gives the sets that a split's questions are drawn from and `asked` says which of
    them are (the costly test, made last); `teach` draws lessons; `ceiling` bounds the numbers
    on the way to a rival's target.
    """

    name: str
    count: int
    ceiling: int
    max_step_tokens: int
    candidates: Callable[[Split], Sequence[arithmetic.Numbers]]
    asked: Callable[[arithmetic.Numbers, Split], bool]
    teach: Callable[[random.Random], tuple[str, list[str]]]

    @property
    def max_depth(self) -> int:
        """One step fewer than numbers, and the answer."""
        return self.count

    def questions(self, split: Split, limit: int | None = None, seed: int = 0) -> list[str]:
        """The puzzles of the split in an order that the seed decides."""
        every = list(self.candidates(split))
        random.Random(f"{self.name} {split} {seed}").shuffle(every)
        chosen = (numbers for numbers in every if self.asked(numbers, split))
        return [arithmetic.ask(numbers, TARGET) for numbers in islice(chosen, limit)]

    def key(self, question: str) -> str:
        """The sorted numbers: other targets over the same numbers share the split."""
        return key(self._parse(question)[0])

    def matches(self, question: str) -> bool:
        """So many numbers and any target."""
        parsed = arithmetic.parse_question(question)
        return parsed is not None and len(parsed[0]) == self.count

    def check(self, question: str, text: str) -> Verdict:
        """Judge a whole reply."""
        return arithmetic.check(*self._parse(question), text)

    def answer(self, text: str) -> str | None:
        """The set of equations used."""
        return arithmetic.vote(text)

    def solve(self, question: str, rng: random.Random) -> list[str]:
        """A random derivation among those that reach the target."""
        numbers, target = self._parse(question)
        return arithmetic.derivation(arithmetic.solve(numbers, target, rng), target)

    def rival(self, question: str, rng: random.Random) -> str:
        """The same numbers with another target."""
        numbers, target = self._parse(question)
        while True:
            other = arithmetic.derive(numbers, rng, self.ceiling)[-1].result
            if other != target:
                return arithmetic.ask(numbers, other)

    def lesson(self, rng: random.Random) -> tuple[str, list[str]]:
        """A train puzzle with a derivation, drawn together."""
        return self.teach(rng)

    def _parse(self, question: str) -> tuple[arithmetic.Numbers, int]:
        parsed = arithmetic.parse_question(question)
        if parsed is None or len(parsed[0]) != self.count:
            raise ValueError(f"not a {self.name} question: {question!r}")
        return parsed
