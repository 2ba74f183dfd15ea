"""Number puzzles: combine all the numbers, two at a time, until the target is left.

Game of 24 and countdown are two of them. The rules: every number is used once, results are whole
and not negative, divisions are exact. A step reads `13 - 9 = 4 (left: 4 4 10)`. Every set of
numbers is in exactly one split, regardless of the target.
"""

import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import NamedTuple

from models.tasks.task import (
    ANSWER_PREFIX,
    Split,
    StepChecker,
    Verdict,
    answer_step,
    fail,
    split_of,
    split_steps,
)

TARGET = 24
QUESTION = re.compile(r"Use ((?:\d{1,3} )+)to make (\d{1,4})\.")
STEP = re.compile(r"(\d{1,6}) ([-+*/]) (\d{1,6}) = (\d{1,9}) \(left: (\d{1,9}(?: \d{1,9})*)\)")

EXACT_COUNT = 4
"""Up to this many numbers the teacher counts all derivations."""

Numbers = tuple[int, ...]


class Move(NamedTuple):
    """One equation and the numbers left after it (sorted)."""

    a: int
    op: str
    b: int
    result: int
    left: Numbers


def ask(numbers: Numbers, target: int) -> str:
    """The question text."""
    return f"Use {' '.join(map(str, sorted(numbers)))} to make {target}."


def parse_question(question: str) -> tuple[Numbers, int] | None:
    """The numbers (sorted) and the target of a question, None if it is not one."""
    match = QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    return tuple(sorted(map(int, match[1].split()))), int(match[2])


def step_text(move: Move) -> str:
    """One derivation step."""
    remaining = " ".join(map(str, move.left))
    return f"{move.a} {move.op} {move.b} = {move.result} (left: {remaining})"


def either_way(move: Move) -> tuple[Move, ...]:
    """The move and, if it is a sum or product, the same with the other operand first."""
    mirrored_move = move._replace(a=move.b, b=move.a)
    return (move, mirrored_move) if move.op in "+*" else (move,)


def results(a: int, b: int) -> Iterator[tuple[int, str, int, int]]:
    """All legal equations over two numbers, larger operand first."""
    a, b = max(a, b), min(a, b)
    yield a, "+", b, a + b
    yield a, "-", b, a - b
    yield a, "*", b, a * b
    if b > 0 and a % b == 0:
        yield a, "/", b, a // b


def moves(numbers: Numbers) -> Iterator[Move]:
    """All distinct legal steps from these numbers."""
    pairs = set()
    for i in range(len(numbers)):
        for j in range(i + 1, len(numbers)):
            pair = (numbers[i], numbers[j])
            if pair in pairs:
                continue
            pairs.add(pair)
            rest = numbers[:i] + numbers[i + 1 : j] + numbers[j + 1 :]
            for a, op, b, result in results(*pair):
                yield Move(a, op, b, result, tuple(sorted((*rest, result))))


@lru_cache(maxsize=200_000)
def reachable(numbers: Numbers, target: int) -> bool:
    """Can these (sorted) numbers make the target, all of them used?"""
    if len(numbers) == 1:
        return numbers[0] == target
    if len(numbers) == 2:
        return any(result == target for *_, result in results(*numbers))
    return any(reachable(move.left, target) for move in moves(numbers))


def plainness(move: Move) -> float:
    """The teacher's preference for a step: large and zero results and divisions weigh less."""
    return (0.1 if move.result > 48 or move.result == 0 else 1.0) * (0.3 if move.op == "/" else 1.0)


@lru_cache(maxsize=200_000)
def ways(numbers: Numbers, target: int) -> float:
    """The derivations that reach the target, weighted by the plainness of their steps."""
    if len(numbers) == 1:
        return float(numbers[0] == target)
    return sum(plainness(move) * ways(move.left, target) for move in moves(numbers))


def solve(numbers: Numbers, target: int, rng: random.Random) -> list[Move]:
    """A random derivation, drawn by plainness (by single steps while there are many numbers)."""
    path = []
    while len(numbers) > 1:
        choices = [m for m in moves(numbers) if reachable(m.left, target)]
        if not choices:
            raise ValueError(f"{numbers} cannot make {target}")
        if len(numbers) <= EXACT_COUNT:
            weights = [plainness(m) * ways(m.left, target) for m in choices]
        else:
            weights = [plainness(m) for m in choices]
        path.append(rng.choices(choices, weights)[0])
        numbers = path[-1].left
    return path


def replay_step(step: str, numbers: Numbers) -> tuple[Numbers, str]:
    """The numbers after a step, and what is illegal about it ('' when legal)."""
    match = STEP.fullmatch(step)
    if match is None:
        return (), "not a step"
    a, b, result = int(match[1]), int(match[3]), int(match[4])
    rest = list(numbers)
    for operand in (a, b):
        if operand not in rest:
            return (), f"{operand} is not left"
        rest.remove(operand)
    if not _holds(a, match[2], b, result):
        return (), f"{a} {match[2]} {b} is not {result}"
    remaining = tuple(sorted((*rest, result)))
    if remaining != tuple(sorted(map(int, match[5].split()))):
        return (), "the numbers left are wrong"
    return remaining, ""


def _holds(a: int, op: str, b: int, result: int) -> bool:
    if op == "/":
        return b > 0 and b * result == a
    return {"+": a + b, "-": a - b, "*": a * b}[op] == result


def derive(numbers: Numbers, rng: random.Random, ceiling: int) -> list[Move]:
    """Random steps down to one number, positive values up to `ceiling`, no step without effect."""
    path = []
    while len(numbers) > 1:
        i, j = sorted(rng.sample(range(len(numbers)), 2))
        rest = numbers[:i] + numbers[i + 1 : j] + numbers[j + 1 :]
        a, op, b, result = rng.choice(list(results(numbers[i], numbers[j])))
        if not 0 < result <= ceiling or (op in "*/" and b == 1):
            continue
        move = Move(a, op, b, result, tuple(sorted((*rest, result))))
        path.append(move)
        numbers = move.left
    return path


def derivation(path: list[Move], target: int) -> list[str]:
    """The steps of a path and its answer line."""
    return [*map(step_text, path), f"{ANSWER_PREFIX}{target}."]


def key(numbers: Numbers) -> str:
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
        path = derive(numbers, rng, ceiling)
        target = path[-1].result
        if target in targets:
            return ask(numbers, target), derivation(path, target)


@dataclass(frozen=True)
class NumberPuzzle(StepChecker):
    """Use `count` numbers to make a target.

    `candidates` gives the sets of numbers that a split's questions are taken from, `is_question`
    says which of them become questions (the costly test, made last); `teach` draws lessons;
    `ceiling` bounds the numbers on the way to a rival's target.
    """

    name: str
    count: int
    ceiling: int
    max_step_tokens: int
    candidates: Callable[[Split], Sequence[Numbers]]
    is_question: Callable[[Numbers, Split], bool]
    teach: Callable[[random.Random], tuple[str, list[str]]]

    @property
    def max_depth(self) -> int:
        """One step fewer than there are numbers, plus the answer."""
        return self.count

    def questions(self, split: Split, limit: int | None = None, seed: int = 0) -> list[str]:
        """The puzzles of the split in an order that the seed decides."""
        candidates = list(self.candidates(split))
        random.Random(f"{self.name} {split} {seed}").shuffle(candidates)
        selection = (numbers for numbers in candidates if self.is_question(numbers, split))
        return [ask(numbers, TARGET) for numbers in islice(selection, limit)]

    def key(self, question: str) -> str:
        """The sorted numbers: other targets over the same numbers share the split."""
        return key(self._parse(question)[0])

    def matches(self, question: str) -> bool:
        """Is this text a question with `count` numbers, and any target?"""
        parsed = parse_question(question)
        return parsed is not None and len(parsed[0]) == self.count

    def _verdict(self, question: str, steps: list[str], *, hopeful: bool) -> Verdict:
        numbers, target = self._parse(question)
        for i, step in enumerate(steps):
            if len(numbers) == 1:
                correct = i == len(steps) - 1 and step == f"{ANSWER_PREFIX}{target}."
                if correct and numbers[0] == target:
                    return Verdict(True, (True,) * len(steps), "")
                return fail(steps, i, f"step {i + 1}: a wrong answer line")
            numbers, problem = replay_step(step, numbers)
            if problem:
                return fail(steps, i, f"step {i + 1}: {problem}")
            if hopeful and not reachable(numbers, target):
                return fail(steps, i, f"step {i + 1}: {target} is out of reach")
        return Verdict(False, (True,) * len(steps), "no answer line")

    def answer(self, text: str) -> str | None:
        """The set of equations used, commutative operands sorted, in sorted order."""
        if answer_step(text) is None:
            return None
        equations = set()
        for step in split_steps(text)[:-1]:
            match = STEP.fullmatch(step)
            if match is None:
                equations.add(step)
                continue
            a, op, b = match[1], match[2], match[3]
            if op in "+*" and int(b) < int(a):
                a, b = b, a
            equations.add(f"{a} {op} {b} = {match[4]}")
        return "; ".join(sorted(equations))

    def solve(self, question: str, rng: random.Random) -> list[str]:
        """A random derivation among those that reach the target."""
        numbers, target = self._parse(question)
        return derivation(solve(numbers, target, rng), target)

    def rival(self, question: str, rng: random.Random) -> str:
        """The same numbers with another target."""
        numbers, target = self._parse(question)
        while True:
            new_target = derive(numbers, rng, self.ceiling)[-1].result
            if new_target != target:
                return ask(numbers, new_target)

    def lesson(self, rng: random.Random) -> tuple[str, list[str]]:
        """A train puzzle with a derivation, drawn together."""
        return self.teach(rng)

    def _parse(self, question: str) -> tuple[Numbers, int]:
        parsed = parse_question(question)
        if parsed is None or len(parsed[0]) != self.count:
            raise ValueError(f"not a {self.name} question: {question!r}")
        return parsed
