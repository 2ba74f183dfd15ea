"""Plans worked on as a search does: best moves, legal ones that waste, and moves that are none.

Endless and exactly labelled, over all legal moves of the states that a walk comes through.
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
"""Of the moves up to the first fault; the others are no moves of their state."""
LATER_SHARE = 0.85
"""Of the moves behind a fault: so many are the best of what is shown."""
SOON_SHARE = 0.3
"""Of the walks that wasted a move: so many claim to be there without being it."""
MISCOPIED_SHARE = 0.25
"""Of the moves that are none: so many lose a block or show one twice, and end the walk."""


def walk(question: str, rng: random.Random) -> list[str]:
    """The steps of one walk, its answer line included. Raises ValueError for no blocks world."""
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
    """What is no move of this state: another state's action, or a right one wrongly shown."""
    legal = dict(moves(state))
    if rng.random() < 0.5:
        action = rng.choice(sorted(legal))
        wrong = [after for _, after in _nearby_moves(legal[action]) if after != legal[action]]
        return action, rng.choice(wrong)
    near_moves = [move for move in _nearby_moves(state) if move[0] not in legal]
    return rng.choice(near_moves) if near_moves else _unknown(state, rng)


def miscopied(state: State, rng: random.Random) -> str:
    """A legal move, shown with a block lost or there twice."""
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
    """Every action of the states that are one move or two away, with what it leads to."""
    return [move for _, after in moves(state) for move in moves(after)]


def _unknown(state: State, rng: random.Random) -> tuple[str, State]:
    """A block that is not there is picked up."""
    blocks = {block for stack in state.stacks for block in stack} | {state.hand}
    strange = rng.choice([letter for letter in LETTERS if letter not in blocks])
    return f"pick up {strange}", state
