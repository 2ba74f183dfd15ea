"""Game of 24: four numbers from 1 to 13, every solvable set of them."""

import random
from functools import cache
from itertools import combinations_with_replacement

from models.tasks import number_puzzle
from models.tasks.number_puzzle import TARGET, NumberPuzzle, key, taught
from models.tasks.task import Split, split_of

COUNT = 4
NUMBERS = range(1, 14)
CEILING = 120
OTHER_TARGETS = range(20, 31)


@cache
def _puzzles(split: Split) -> tuple[number_puzzle.Numbers, ...]:
    candidates = combinations_with_replacement(NUMBERS, COUNT)
    return tuple(
        numbers
        for numbers in candidates
        if split_of(key(numbers)) == split and number_puzzle.reachable(numbers, TARGET)
    )


def _lesson(rng: random.Random) -> tuple[str, list[str]]:
    """Nineteen in twenty lessons make 24, the others what a random derivation yields."""
    if rng.random() >= 0.95:
        return taught(rng, NUMBERS, COUNT, CEILING, OTHER_TARGETS)
    numbers = rng.choice(_puzzles("train"))
    path = number_puzzle.solve(numbers, TARGET, rng)
    return number_puzzle.ask(numbers, TARGET), number_puzzle.derivation(path, TARGET)


GAME24 = NumberPuzzle(
    name="game24",
    count=COUNT,
    ceiling=CEILING,
    max_step_tokens=24,
    candidates=_puzzles,
    is_question=lambda numbers, split: True,
    teach=_lesson,
)
