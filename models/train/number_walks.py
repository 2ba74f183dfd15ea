"""Random derivations of number puzzles like a search's: good steps, dead ends and near misses.

Endless and exactly labelled. A near miss imitates a policy that forces a sum to come out: a result
off by a little, a remainder dropped, a number used twice or missing from the rest; half of them
leave numbers that would make the target. The steps after it go on as if it were right.
"""

import random

from models.tasks.number_puzzle import (
    Move,
    Numbers,
    derivation,
    either_way,
    moves,
    parse_question,
    plainness,
    reachable,
    step_text,
)

GOOD_SHARE, LEGAL_SHARE = 0.77, 0.12
"""Shares of the steps up to the first illegal one; the others are near misses."""
AFTER_FAULT_SHARE = 0.8
"""The share of steps after a near miss that go for the target if it is within reach."""
TEMPTING_SHARE = 0.5
"""The share of wrong results after which the target could still be reached."""
ANY_SHARE = 0.4
"""The share of those that, late in a puzzle, may be any number, however far off."""
MOST = 199
"""Larger numbers take several tokens, and are seldom written."""


def walk(question: str, rng: random.Random) -> list[str]:
    """The steps of a walk and its answer line. Raises ValueError if it is no number puzzle."""
    parsed = parse_question(question)
    if parsed is None:
        raise ValueError(f"not a number puzzle: {question!r}")
    numbers, target = parsed
    steps: list[str] = []
    faulty = False
    while len(numbers) > 1:
        kind = rng.random()
        if faulty:
            move = _towards(numbers, target, rng, AFTER_FAULT_SHARE)
        elif kind < GOOD_SHARE + LEGAL_SHARE:
            move = _towards(numbers, target, rng, float(kind < GOOD_SHARE))
        else:
            faulty = True
            move = near_miss(numbers, target, rng)
        # For right and wrong steps: the teacher's order would give right ones away.
        steps.append(step_text(rng.choice(either_way(move))))
        numbers = move.left
    return [*steps, *derivation([], target)]


def _towards(numbers: Numbers, target: int, rng: random.Random, share: float) -> Move:
    """A legal step; in ``share`` of the cases one that keeps the target within reach, if any."""
    legal = [move for move in moves(numbers) if move.result <= MOST] or list(moves(numbers))
    good = [move for move in legal if reachable(move.left, target)] if rng.random() < share else []
    pool = good or legal
    return rng.choices(pool, [plainness(move) for move in pool])[0]


def near_miss(numbers: Numbers, target: int, rng: random.Random) -> Move:
    """An illegal step, as the move that it claims to be."""
    wrong = rng.choice((_wrong_result, _wrong_result, _wrong_operand, _wrong_rest, _swapped))
    return wrong(numbers, target, rng)


def _wrong_result(numbers: Numbers, target: int, rng: random.Random) -> Move:
    """An equation that does not hold: off by a little, a digit, an operator or a remainder."""
    i, j = rng.sample(range(len(numbers)), 2)
    a, b = numbers[i], numbers[j]
    rest = [number for k, number in enumerate(numbers) if k not in (i, j)]
    op = rng.choice("+-*//")
    if op == "-" and a < b and rng.random() < 0.7:
        a, b = b, a
    if op == "/" and a < b and rng.random() < 0.7:
        a, b = b, a
    true = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else -1}[op]
    near = {int(true) + off for off in (-10, -3, -2, -1, 0, 1, 2, 3, 10)}
    near |= {a + b, abs(a - b), a * b, int(str(int(abs(true)))[::-1])}
    near |= {a // b, -(-a // b)} if b else set()
    claims = [n for n in sorted(near) if 0 <= n <= MOST and n != true]
    claim = rng.choice(claims)
    if rng.random() < TEMPTING_SHARE:
        if len(rest) < 3 and rng.random() < ANY_SHARE:
            claims = [n for n in range(MOST + 1) if n != true]
        tempting = [n for n in claims if reachable(tuple(sorted((*rest, n))), target)]
        claim = rng.choice(tempting or [claim])
    return Move(a, op, b, claim, tuple(sorted((*rest, claim))))


def _wrong_operand(numbers: Numbers, target: int, rng: random.Random) -> Move:
    """A step with a number that is not there, or is there once and used twice."""
    operand = rng.choice(numbers)
    others = [n for n in range(1, 14) if n not in numbers]
    strange = operand if numbers.count(operand) == 1 and rng.random() < 0.5 else rng.choice(others)
    rest = list(numbers)
    rest.remove(operand)
    if len(rest) > 1 and rng.random() < 0.5:
        rest.pop(rng.randrange(len(rest)))
    legal = [move for move in moves(tuple(sorted((operand, strange)))) if move.result <= MOST]
    tempting = [m for m in legal if reachable(tuple(sorted((*rest, m.result))), target)]
    move = rng.choice(tempting or legal)
    return move._replace(left=tuple(sorted((*rest, move.result))))


def _wrong_rest(numbers: Numbers, target: int, rng: random.Random) -> Move:
    """A right equation with the wrong numbers left: one lost, doubled, changed or not removed."""
    move = _towards(numbers, target, rng, 0.5)
    remaining = list(move.left)
    place = rng.randrange(len(remaining))
    match rng.choice(("lost", "twice", "changed", "kept")):
        case "lost" if len(remaining) > 1:
            remaining.pop(place)
        case "twice":
            remaining.append(remaining[place])
        case "kept":
            remaining.append(move.a)
        case _:
            remaining[place] = max(0, remaining[place] + rng.choice((-2, -1, 1, 2)))
    if tuple(sorted(remaining)) == move.left:
        remaining.append(move.b)
    return move._replace(left=tuple(sorted(remaining)))


def _swapped(numbers: Numbers, target: int, rng: random.Random) -> Move:
    """A right equation, but one of the numbers left is replaced by an operand just used."""
    move = _towards(numbers, target, rng, 0.5)
    rest = list(move.left)
    rest.remove(move.result)
    swaps = [
        tuple(sorted((*rest[:place], operand, *rest[place + 1 :], move.result)))
        for place in range(len(rest))
        for operand in (move.a, move.b)
        if operand != rest[place]
    ]
    if not swaps:
        return _wrong_result(numbers, target, rng)
    tempting = [remaining for remaining in swaps if reachable(remaining, target)]
    remaining = rng.choice(tempting if tempting and rng.random() < TEMPTING_SHARE else swaps)
    return move._replace(left=remaining)
