"""Random plans like those of a search: best moves, legal but wasted ones, and illegal ones.

Endless and exactly labelled, over all legal moves of the states on the way.
"""

import random

from models.tasks.blocksworld import (
    LETTERS,
    Puzzle,
    State,
    distance,
    moves,
    parse_question,
    show_state,
)
from models.tasks.task import ANSWER_PREFIX

BEST_SHARE, LEGAL_SHARE = 0.88, 0.07
"""Shares of the moves up to the first fault; the others are illegal in their state."""
LATER_SHARE = 0.85
"""The share of moves after a fault that are the best for the state shown."""
SOON_SHARE = 0.3
"""The share of walks without spare moves: after a wasted one they claim a goal not reached."""
MISCOPIED_SHARE = 0.25
"""The share of illegal moves that lose a block or show one twice, and end the walk."""


def walk(question: str, rng: random.Random) -> list[str]:
    """The steps of a walk and its answer line. Raises ValueError if it is no blocks world."""
    puzzle = parse_question(question)
    if puzzle is None:
        raise ValueError(f"not a blocks world: {question!r}")
    state, faulty = puzzle.start, False
    steps: list[str] = []
    most = puzzle.moves + (0 if rng.random() < SOON_SHARE else rng.choice((2, 4)))
    while state != puzzle.goal and len(steps) < most:
        kind = rng.random()
        if not faulty and kind >= 1 - MISCOPIED_SHARE * (1 - BEST_SHARE - LEGAL_SHARE):
            steps.append(miscopied(state, rng))
            break
        if faulty or kind < BEST_SHARE + LEGAL_SHARE:
            share = LATER_SHARE if faulty else float(kind < BEST_SHARE)
            action, after = _move(state, puzzle, rng, best=rng.random() < share)
            faulty |= len(steps) + 1 + distance(after, puzzle.goal) > puzzle.moves
        else:
            faulty = True
            action, after = no_move(state, rng)
        steps.append(f"{action}: {show_state(after)}")
        state = after
    claim = len(steps) if rng.random() < 0.5 else puzzle.moves
    return [*steps, f"{ANSWER_PREFIX}{claim} moves."]


def _move(state: State, puzzle: Puzzle, rng: random.Random, *, best: bool) -> tuple[str, State]:
    """A legal move: one of those that come nearest to the goal, or any of the others."""
    legal = [(distance(after, puzzle.goal), action, after) for action, after in moves(state)]
    least = min(option[0] for option in legal)
    nearest = [option for option in legal if option[0] == least]
    others = [option for option in legal if option[0] != least]
    _, action, after = rng.choice(nearest if best or not others else others)
    return action, after


def no_move(state: State, rng: random.Random) -> tuple[str, State]:
    """An illegal move: an action of another state, or a legal one with a wrong state shown."""
    legal = dict(moves(state))
    if rng.random() < 0.5:
        action = rng.choice(sorted(legal))
        wrong = [after for _, after in _nearby_moves(legal[action]) if after != legal[action]]
        return action, rng.choice(wrong)
    near_moves = [move for move in _nearby_moves(state) if move[0] not in legal]
    return rng.choice(near_moves) if near_moves else _unknown(state, rng)


def miscopied(state: State, rng: random.Random) -> str:
    """A legal move, shown with one block lost or doubled."""
    action, after = rng.choice(list(moves(state)))
    stacks = [list(stack) for stack in after.stacks]
    height, stack = rng.choice([(h, stack) for stack in stacks for h in range(len(stack))])
    if rng.random() < 0.5:
        stack.pop(height)
    else:
        stacks.append([])
        rng.choice(stacks).append(stack[height])
    shown_stacks = tuple(sorted(tuple(stack) for stack in stacks if stack))
    return f"{action}: {show_state(State(shown_stacks, after.hand))}"


def _nearby_moves(state: State) -> list[tuple[str, State]]:
    """Every action of the states one move away, with the state it leads to."""
    return [move for _, after in moves(state) for move in moves(after)]


def _unknown(state: State, rng: random.Random) -> tuple[str, State]:
    """Pick up a block that is not there."""
    blocks = {block for stack in state.stacks for block in stack} | {state.hand}
    strange = rng.choice([letter for letter in LETTERS if letter not in blocks])
    return f"pick up {strange}", state
