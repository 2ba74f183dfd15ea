"""Next steps of one state, right and wrong, and what is wrong with each.

A reward model has to order them: a search goes on with the best child of a right path.
Endless, exactly labelled by the tasks' checkers, and without sampling;
`python -m models.train.measure siblings` says how often a model puts a right one above a wrong one.
"""

import random
from collections.abc import Iterator
from itertools import islice
from typing import NamedTuple

from models.tasks import TASKS, blocksworld, number_puzzle
from models.tasks.number_puzzle import Move, Numbers, reachable, step_text

RIGHT, DEAD_END, WASTED, MISSHOWN = "right", "dead end", "wasted", "misshown"
LEGAL_EACH = 3
"""The most right steps, and the most dead ends, of a number puzzle."""
TEMPTING_SHARE = 0.5
"""The share of near misses that leave the target in reach, if one of the first LOOKED_AT does."""
LOOKED_AT = 12
OTHER_RESULT = {"-": int.__add__, "+": int.__mul__, "*": int.__add__, "/": int.__sub__}


class Sibling(NamedTuple):
    """A step, and what it is: `right`, or what is wrong with it."""

    text: str
    kind: str


class Siblings(NamedTuple):
    """A question, the right steps up to a state, and steps from there."""

    task: str
    question: str
    before: list[str]
    steps: list[Sibling]


def siblings(name: str, question: str, rng: random.Random) -> Siblings:
    """Steps from a random state on a right path. Raises ValueError for a task without siblings."""
    path = TASKS[name].solve(question, rng)[:-1]
    before = path[: rng.randrange(len(path))]
    puzzle = number_puzzle.parse_question(question)
    blocks = blocksworld.parse_question(question)
    if puzzle is not None:
        steps = list(_of_numbers(*puzzle, before, rng))
    elif blocks is not None:
        steps = list(_of_blocks(blocks, before, rng))
    else:
        raise ValueError(f"no siblings are known of {question!r}")
    return Siblings(name, question, before, steps)


def _of_numbers(
    numbers: Numbers, target: int, before: list[str], rng: random.Random
) -> Iterator[Sibling]:
    for step in before:
        numbers, _ = number_puzzle.replay_step(step, numbers)
    legal = list(number_puzzle.moves(numbers))
    rng.shuffle(legal)
    for kind, good in ((RIGHT, True), (DEAD_END, False)):
        candidates = (move for move in legal if reachable(move.left, target) == good)
        yield from (Sibling(step_text(move), kind) for move in islice(candidates, LEGAL_EACH))
    for kind, misses in near_misses(numbers, target, legal).items():
        rng.shuffle(misses)
        tempting = [m for m in misses[:LOOKED_AT] if reachable(m.left, target)]
        if misses:
            pool = tempting if tempting and rng.random() < TEMPTING_SHARE else misses
            yield Sibling(step_text(pool[0]), kind)


def near_misses(numbers: Numbers, target: int, legal: list[Move]) -> dict[str, list[Move]]:
    """Near misses by kind, as a policy writes that forces a sum to come out."""
    claims = {
        "off by one": [(m, m.result + off) for m in legal for off in (-1, 1)],
        "digit": [(m, m.result + off) for m in legal for off in (-20, -10, 10, 20)],
        "operator": [(m, OTHER_RESULT[m.op](m.a, m.b)) for m in legal],
        "forged": [(m, target) for m in legal if len(m.left) == 1],
    }
    misses = {
        kind: [_claim(m, result) for m, result in pairs if result >= 0 and result != m.result]
        for kind, pairs in claims.items()
    }
    return misses | {
        "remainder": [
            _claim(m._replace(op="/"), m.a // m.b + up)
            for m in legal
            if m.op == "-" and m.b > 1 and m.a % m.b
            for up in (0, 1)
        ],
        "used twice": list(_used_twice(numbers)),
        "dropped": [m._replace(left=m.left[1:]) for m in legal if len(m.left) > 1],
        "kept": [m._replace(left=tuple(sorted((*m.left, m.b)))) for m in legal],
    }


def _claim(move: Move, result: int) -> Move:
    rest = list(move.left)
    rest.remove(move.result)
    return move._replace(result=result, left=tuple(sorted((*rest, result))))


def _used_twice(numbers: Numbers) -> Iterator[Move]:
    for number in set(numbers):
        rest = list(numbers)
        rest.remove(number)
        if number not in rest:
            for a, op, b, result in number_puzzle.results(number, number):
                yield Move(a, op, b, result, tuple(sorted((*rest, result))))


def _of_blocks(
    puzzle: blocksworld.Puzzle, before: list[str], rng: random.Random
) -> Iterator[Sibling]:
    """All legal moves, and one of them with the state shown that another leads to."""
    state = puzzle.start
    for step in before:
        state = dict(blocksworld.moves(state))[step.partition(": ")[0]]
    legal = list(blocksworld.moves(state))
    remaining = puzzle.moves - len(before) - 1
    for action, after in legal:
        kind = RIGHT if blocksworld.distance(after, puzzle.goal) <= remaining else WASTED
        yield Sibling(f"{action}: {blocksworld.show_state(after)}", kind)
    if len(legal) > 1:
        (action, _), (_, wrong_state) = rng.sample(legal, 2)
        yield Sibling(f"{action}: {blocksworld.show_state(wrong_state)}", MISSHOWN)
