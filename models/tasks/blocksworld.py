"""Blocksworld: STRIPS with one hand, and as many moves as the shortest plan needs.

Stacks are written bottom to top and sorted by their lowest block. A question reads
`Blocks a c / b. Reach b c / a in 4 moves.`, a step `unstack c from a: a / b, hand c`.
Since no move can be wasted, a breadth-first distance decides exactly which states are lost.
"""

import random
import re
from collections.abc import Iterator
from functools import cache, lru_cache
from itertools import groupby, permutations, product
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
    stream,
)

LETTERS = "abcdefgh"
SIZES = (4, 5, 5, 6)
"""The number of blocks is drawn from these."""
PLAN_MOVES = range(6, 13)
DEFAULT_LIMIT = 500
FAR = 255

QUESTION = re.compile(
    r"Blocks ([a-h](?: /| [a-h])*)\. Reach ([a-h](?: /| [a-h])*) in (\d{1,2}) moves\."
)
ANSWER_LINE = re.compile(r"(\d{1,2}) moves")

Stacks = tuple[tuple[str, ...], ...]


class State(NamedTuple):
    """The stacks on the table (sorted) and the block in the hand, if any."""

    stacks: Stacks
    hand: str


class Puzzle(NamedTuple):
    """Where to start, where to arrive, and in how many moves."""

    start: State
    goal: State
    moves: int


class Graph(NamedTuple):
    """All states of the first n blocks, the index of each (`place`), and moves by state index."""

    states: list[State]
    place: dict[State, int]
    edges: list[list[tuple[str, int]]]


def show_stacks(stacks: Stacks) -> str:
    """Write stacks as `a c / b / d e`."""
    return " / ".join(" ".join(stack) for stack in stacks)


def show_state(state: State) -> str:
    """Write the stacks and what the hand holds."""
    return show_stacks(state.stacks) + (f", hand {state.hand}" if state.hand else "")


def moves(state: State) -> Iterator[tuple[str, State]]:
    """Every legal action with the state it leads to."""
    for i, stack in enumerate(state.stacks):
        rest = state.stacks[:i] + state.stacks[i + 1 :]
        top = stack[-1]
        if state.hand:
            on_top = tuple(sorted((*rest, (*stack, state.hand))))
            yield f"stack {state.hand} on {top}", State(on_top, "")
        elif len(stack) == 1:
            yield f"pick up {top}", State(rest, top)
        else:
            yield f"unstack {top} from {stack[-2]}", State(tuple(sorted((*rest, stack[:-1]))), top)
    if state.hand:
        yield f"put down {state.hand}", State(tuple(sorted((*state.stacks, (state.hand,)))), "")


def step_texts(state: State) -> dict[str, State]:
    """Every legal step as it is written, with the state it leads to."""
    return {f"{action}: {show_state(after)}": after for action, after in moves(state)}


@cache
def graph(size: int) -> Graph:
    """The state graph over `size` blocks, searched once from all blocks on the table."""
    first = State(tuple((letter,) for letter in LETTERS[:size]), "")
    states, index = [first], {first: 0}
    edges: list[list[tuple[str, int]]] = []
    for state in states:
        out = []
        for action, after in moves(state):
            if after not in index:
                index[after] = len(states)
                states.append(after)
            out.append((action, index[after]))
        edges.append(out)
    return Graph(states, index, edges)


@lru_cache(maxsize=4096)
def distances(goal: State) -> bytes:
    """For each state index, the moves to the goal (moves are reversible)."""
    space = graph(sum(map(len, goal.stacks)))
    plan_lengths = bytearray([FAR]) * len(space.states)
    frontier, steps = [space.place[goal]], 0
    plan_lengths[frontier[0]] = 0
    while frontier:
        steps += 1
        next_frontier = []
        for here in frontier:
            for _, there in space.edges[here]:
                if plan_lengths[there] == FAR:
                    plan_lengths[there] = steps
                    next_frontier.append(there)
        frontier = next_frontier
    return bytes(plan_lengths)


def distance(state: State, goal: State) -> int:
    """The length of the shortest plan."""
    size = sum(map(len, goal.stacks))
    return distances(goal)[graph(size).place[state]]


def _parse_stacks(text: str) -> Stacks:
    return tuple(sorted(tuple(stack.split()) for stack in text.split(" / ")))


def _blocks(stacks: Stacks) -> str:
    return "".join(sorted("".join(map("".join, stacks))))


def parse_question(question: str) -> Puzzle | None:
    """The puzzle a text asks, None if it is not one."""
    match = QUESTION.fullmatch(question.strip())
    if match is None:
        return None
    start, goal = _parse_stacks(match[1]), _parse_stacks(match[2])
    blocks = _blocks(start)
    if blocks != _blocks(goal) or blocks != LETTERS[: len(blocks)] or len(blocks) > max(SIZES):
        return None
    return Puzzle(State(start, ""), State(goal, ""), int(match[3]))


def ask(puzzle: Puzzle) -> str:
    """The question text."""
    start, goal = show_stacks(puzzle.start.stacks), show_stacks(puzzle.goal.stacks)
    return f"Blocks {start}. Reach {goal} in {puzzle.moves} moves."


def canonical(start: Stacks, goal: Stacks) -> str:
    """The puzzle up to the names of its blocks."""
    by_height = sorted(start, key=len, reverse=True)
    groups = [list(permutations(group)) for _, group in groupby(by_height, key=len)]
    shapes = []
    for choice in product(*groups):
        order = [block for group in choice for stack in group for block in stack]
        name = {block: LETTERS[i] for i, block in enumerate(order)}
        renamed = sorted("".join(name[block] for block in stack) for stack in goal)
        shapes.append(" ".join(renamed))
    return f"{' '.join(str(len(stack)) for stack in by_height)} > {min(shapes)}"


def _draw(rng: random.Random, split: Split) -> Puzzle:
    while True:
        space = graph(rng.choice(SIZES))
        start, goal = rng.choice(space.states), rng.choice(space.states)
        if start.hand or goal.hand or split_of(canonical(start.stacks, goal.stacks)) != split:
            continue
        length = distance(start, goal)
        if length in PLAN_MOVES:
            return Puzzle(start, goal, length)


class Blocksworld(StepChecker):
    """Rebuild the stacks in exactly as many moves as the shortest plan takes."""

    name = "blocksworld"
    max_depth = PLAN_MOVES.stop
    max_step_tokens = 32

    def questions(self, split: Split, limit: int | None = None, seed: int = 0) -> list[str]:
        """An endless stream that the seed decides, cut at `limit`; puzzles never repeat."""

        def draw(rng: random.Random) -> tuple[str, str]:
            puzzle = _draw(rng, split)
            return canonical(puzzle.start.stacks, puzzle.goal.stacks), ask(puzzle)

        limit = DEFAULT_LIMIT if limit is None else limit
        return stream(f"blocksworld {split} {seed}", draw, limit)

    def key(self, question: str) -> str:
        """The puzzle up to block names."""
        puzzle = self._parse(question)
        return canonical(puzzle.start.stacks, puzzle.goal.stacks)

    def matches(self, question: str) -> bool:
        """Is this text a blocksworld question?"""
        return parse_question(question) is not None

    def _verdict(self, question: str, steps: list[str], *, hopeful: bool) -> Verdict:
        """Judge the moves; a wasted one makes the goal unreachable in time."""
        state, goal, budget = self._parse(question)
        for i, step in enumerate(steps):
            if state == goal and step.startswith(ANSWER_PREFIX):
                if i == len(steps) - 1 and step == f"{ANSWER_PREFIX}{i} moves.":
                    return Verdict(True, (True,) * len(steps), "")
                return fail(steps, i, f"step {i + 1}: a wrong answer line")
            action, _, state_text = step.partition(": ")
            after = dict(moves(state)).get(action)
            if after is None:
                return fail(steps, i, f"step {i + 1}: no such move")
            if state_text != show_state(after):
                return fail(steps, i, f"step {i + 1}: the state shown is wrong")
            if hopeful and i + 1 + distance(after, goal) > budget:
                return fail(steps, i, f"step {i + 1}: the goal is out of reach")
            state = after
        return Verdict(False, (True,) * len(steps), "no answer line")

    def answer(self, text: str) -> str | None:
        """The sequence of moves."""
        claim = answer_step(text)
        if claim is None or ANSWER_LINE.fullmatch(claim) is None:
            return None
        return "; ".join(step.partition(": ")[0] for step in split_steps(text)[:-1])

    def solve(self, question: str, rng: random.Random) -> list[str]:
        """A random shortest plan."""
        return self._plan(self._parse(question), rng)

    def rival(self, question: str, rng: random.Random) -> str:
        """The same start with another goal."""
        start, goal, _ = self._parse(question)
        space = graph(sum(map(len, goal.stacks)))
        while True:
            new_goal = rng.choice(space.states)
            if not new_goal.hand and new_goal not in (goal, start):
                return ask(Puzzle(start, new_goal, distance(start, new_goal)))

    def lesson(self, rng: random.Random) -> tuple[str, list[str]]:
        """A train puzzle with a random shortest plan."""
        puzzle = _draw(rng, "train")
        return ask(puzzle), self._plan(puzzle, rng)

    def _plan(self, puzzle: Puzzle, rng: random.Random) -> list[str]:
        state, steps = puzzle.start, []
        remaining = distance(state, puzzle.goal)
        while remaining:
            remaining -= 1
            choices = [(a, s) for a, s in moves(state) if distance(s, puzzle.goal) == remaining]
            action, state = rng.choice(choices)
            steps.append(f"{action}: {show_state(state)}")
        return [*steps, f"{ANSWER_PREFIX}{len(steps)} moves."]

    def _parse(self, question: str) -> Puzzle:
        puzzle = parse_question(question)
        if puzzle is None:
            raise ValueError(f"not a blocksworld question: {question!r}")
        return puzzle
