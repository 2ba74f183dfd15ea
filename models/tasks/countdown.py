"""Countdown: six numbers from 1 to 9; five steps with wide branching.

Questions are the sets with an open middle game: random steps down to three numbers leave the
target within reach often enough.
"""

import random
from functools import cache
from itertools import combinations_with_replacement

from models.tasks import number_puzzle
from models.tasks.number_puzzle import TARGET, NumberPuzzle, key, taught
from models.tasks.task import split_of

COUNT = 6
NUMBERS = range(1, 10)
CEILING = 40
ROLLOUTS = 24
OPEN_SHARE = 0.29
"""The least share of rollouts to three numbers that keep the target within reach."""


@cache
def _is_open(numbers: number_puzzle.Numbers) -> bool:
    rng = random.Random(key(numbers))
    middles = (number_puzzle.derive(numbers, rng, CEILING)[COUNT - 4].left for _ in range(ROLLOUTS))
    alive = sum(number_puzzle.reachable(middle, TARGET) for middle in middles)
    return alive >= OPEN_SHARE * ROLLOUTS


COUNTDOWN = NumberPuzzle(
    name="countdown",
    count=COUNT,
    ceiling=CEILING,
    max_step_tokens=28,
    candidates=lambda split: list(combinations_with_replacement(NUMBERS, COUNT)),
    is_question=lambda numbers, split: split_of(key(numbers)) == split and _is_open(numbers),
    teach=lambda rng: taught(rng, NUMBERS, COUNT, CEILING, (TARGET,)),
)
