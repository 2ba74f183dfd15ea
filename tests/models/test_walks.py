"""Walks through puzzles, which the reward model is trained on without sampling."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from models.tasks import TASKS
from models.tasks.blocksworld import Puzzle, State, ask, distance, moves, step_texts
from models.tasks.number_puzzle import Move, either_way, replay_step, step_text
from models.tasks.story import conclusions, parse_story
from models.tasks.story import given as facts_given
from models.tasks.task import STEP_BREAK
from models.train import block_walks, number_walks, story_walks
from models.train.batches import load_tokenizer
from models.train.prm import WALKS, walked

SEEDS = st.integers(0, 2**32)


@settings(max_examples=60, deadline=None)
@given(SEEDS, st.sampled_from(["game24", "countdown"]))
def test_a_near_miss_is_illegal_whatever_it_claims(seed: int, name: str) -> None:
    """A near miss breaks a rule, so that it is wrong whether or not the target is in reach."""
    rng = random.Random(seed)
    question = TASKS[name].lesson(rng)[0]
    numbers = tuple(map(int, question.removeprefix("Use ").split(" to ")[0].split()))
    move = number_walks.near_miss(numbers, 24, rng)
    assert replay_step(step_text(move), numbers)[1]
    assert move.left == tuple(sorted(move.left))


def test_the_order_of_operands_tells_nothing() -> None:
    """Sums and products are written either way round; quotients are not."""
    texts = {step_text(move) for move in either_way(Move(6, "*", 4, 24, (24,)))}
    assert texts == {"6 * 4 = 24 (left: 24)", "4 * 6 = 24 (left: 24)"}
    quotient = Move(6, "/", 2, 3, (3,))
    assert either_way(quotient) == (quotient,)
    rng = random.Random(1)
    walks = [number_walks.walk("Use 3 8 8 8 to make 24.", rng)[0] for _ in range(60)]
    assert {"8 * 3 = 24 (left: 8 8 24)", "3 * 8 = 24 (left: 8 8 24)"} <= set(walks)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_no_move_is_none_of_its_state(seed: int) -> None:
    """The action with the state it shows is not one of the legal moves."""
    rng = random.Random(seed)
    state = State((("a", "c"), ("b",), ("d",)), "")
    for _ in range(rng.randrange(4)):
        state = rng.choice([after for _, after in moves(state)])
    action, after = block_walks.no_move(state, rng)
    assert dict(moves(state)).get(action) != after


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_a_miscopied_state_is_none_of_a_move(seed: int) -> None:
    """A miscopied state is that of no legal move: a block is lost or doubled."""
    rng = random.Random(seed)
    state = State((("a", "c"), ("b",), ("d",)), "")
    assert block_walks.miscopied(state, rng) not in step_texts(state)


@settings(max_examples=60, deadline=None)
@given(SEEDS)
def test_a_near_miss_of_a_story_does_not_follow(seed: int) -> None:
    """It follows neither from the facts nor from conclusions so far."""
    rng = random.Random(seed)
    story = parse_story(TASKS["wordproblem"].lesson(rng)[0])
    assert story is not None
    facts = facts_given(story)
    miss = story_walks.near_miss(story, facts, rng)
    assert miss is not None
    assert miss[0] not in {text for text, _, _ in conclusions(story, facts)}


@pytest.mark.parametrize("name", sorted(WALKS))
def test_a_walk_ends_in_an_answer_and_has_right_and_wrong_steps(name: str) -> None:
    """Right, illegal and dead-end walks all occur; after a wrong step all steps are wrong."""
    rng, task = random.Random(5), TASKS[name]
    right = illegal = dead = 0
    for _ in range(60):
        question = task.lesson(rng)[0]
        text = STEP_BREAK.join(WALKS[name](question, rng))
        verdict = task.check(question, text)
        assert list(verdict.steps) == sorted(verdict.steps, reverse=True)
        fault = task.first_illegal(question, text)
        right += verdict.correct
        illegal += fault is not None and not any(verdict.steps[fault:])
        dead += fault is None and not verdict.correct
    assert right > 5
    assert illegal > 10
    assert right + illegal + dead == 60


def test_a_walk_of_best_moves_is_a_plan() -> None:
    """A walk whose every step is right reaches the goal within the allowed moves."""
    rng = random.Random(2)
    start, goal = State((("a",), ("b",), ("c",)), ""), State((("a", "b", "c"),), "")
    puzzle = Puzzle(start, goal, distance(start, goal))
    task = TASKS["blocksworld"]
    verdicts = [
        task.check(ask(puzzle), STEP_BREAK.join(block_walks.walk(ask(puzzle), rng)))
        for _ in range(40)
    ]
    correct = [verdict for verdict in verdicts if all(verdict.steps)]
    assert correct
    assert all(verdict.correct and len(verdict.steps) == 5 for verdict in correct)


def test_a_walked_row_has_a_label_a_step() -> None:
    """A row has one label for each step, as sampled replies do, and ends with the end token."""
    tokenizer, rng = load_tokenizer(), random.Random(3)
    row = walked(tokenizer, ("blocksworld",), rng)
    assert row.task == "blocksworld"
    assert len(row.steps) == len(row.labels)
    assert row.steps[-1][-1] == tokenizer.eos_token_id


def test_other_questions_are_refused() -> None:
    """Each walk refuses a question of another task."""
    for walk in {number_walks.walk, block_walks.walk, story_walks.walk}:
        with pytest.raises(ValueError, match="not a"):
            walk("How many apples does Dan have?", random.Random(0))
