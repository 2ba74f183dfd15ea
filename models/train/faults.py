"""Find the place in a step's wording where it goes wrong.

A verdict on a whole step says little about why: the reward model learns to compare a step with
the text before it far sooner if it also learns, word by word, whether the step may still be
right.
"""

from collections.abc import Iterator
from typing import NamedTuple

from models.tasks import blocksworld, number_puzzle
from models.tasks import story as english
from models.tasks.number_puzzle import Numbers
from models.tasks.task import ANSWER_PREFIX


def right_letters(question: str, steps: list[str]) -> int:
    """How many first letters the last step shares with a legal one; those before must be legal.

    Raises ValueError if `question` is of no task.
    """
    story, numbers, blocks = (
        english.parse_story(question),
        number_puzzle.parse_question(question),
        blocksworld.parse_question(question),
    )
    if story is not None:
        legal = _of_story(story, steps[:-1])
    elif numbers is not None:
        legal = _of_numbers(*numbers, steps[:-1])
    elif blocks is not None:
        legal = _of_blocks(blocks, steps[:-1])
    else:
        raise ValueError(f"a question of no task: {question!r}")
    return max((_shared(steps[-1], text) for text in legal), default=0)


def _of_story(story: english.Story, before: list[str]) -> Iterator[str]:
    amounts = english.amounts_after(story, before)
    yield from (text for text, _, _ in english.conclusions(story, amounts))
    if story.who in amounts:
        yield f"{ANSWER_PREFIX}{amounts[story.who]}."


def _of_numbers(numbers: Numbers, target: int, before: list[str]) -> Iterator[str]:
    for step in before:
        numbers, _ = number_puzzle.replay_step(step, numbers)
    if numbers == (target,):
        yield f"{ANSWER_PREFIX}{target}."
    for move in number_puzzle.moves(numbers):
        yield from map(number_puzzle.step_text, number_puzzle.either_way(move))


def _of_blocks(puzzle: blocksworld.Puzzle, before: list[str]) -> Iterator[str]:
    state = puzzle.start
    for step in before:
        state = blocksworld.step_texts(state)[step]
    if state == puzzle.goal:
        yield f"{ANSWER_PREFIX}{len(before)} moves."
    yield from blocksworld.step_texts(state)


class PlanStep(NamedTuple):
    """The state after a step of a plan: the moves from there to the goal, and for each block, in
    the order in which the step shows them, whether it is in its final place."""

    moves_to_go: int
    in_place: list[bool]


def plan(question: str, steps: list[str]) -> list[PlanStep]:
    """The states after a blocks world's steps, up to the first illegal one. Raises ValueError."""
    puzzle = blocksworld.parse_question(question)
    if puzzle is None:
        raise ValueError(f"not a blocks world: {question!r}")
    state, plan_steps = puzzle.start, []
    for step in steps:
        after = blocksworld.step_texts(state).get(step)
        if after is None:
            break
        state = after
        moves = blocksworld.distance(state, puzzle.goal)
        plan_steps.append(PlanStep(moves, _in_place(state, puzzle.goal)))
    return plan_steps


def _in_place(state: blocksworld.State, goal: blocksworld.State) -> list[bool]:
    """Whether each block and all below it stand as in the goal; what the hand holds does not."""
    stays = {stack[:height] for stack in goal.stacks for height in range(1, len(stack) + 1)}
    heights = [(stack, h) for stack in state.stacks for h in range(1, len(stack) + 1)]
    return [stack[:h] in stays for stack, h in heights] + [False] * bool(state.hand)


def _shared(first: str, second: str) -> int:
    count = 0
    for a, b in zip(first, second, strict=False):
        if a != b:
            break
        count += 1
    return count
