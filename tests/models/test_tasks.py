"""The tasks: splits never meet, teachers are always right, checkers see every fault."""

import random

import pytest

from models.tasks import TASKS, number_puzzle
from models.tasks.story import NAMES
from models.tasks.task import STEP_BREAK, Task, Verdict, split_of

SPLITS = ("train", "dev", "test")
EACH_TASK = pytest.mark.parametrize("task", TASKS.values(), ids=TASKS)

GAME = "Use 4 9 10 13 to make 24."
GAME_STEPS = [
    "13 - 9 = 4 (left: 4 4 10)",
    "10 - 4 = 6 (left: 4 6)",
    "6 * 4 = 24 (left: 24)",
    "The answer is 24.",
]
BLOCKS = "Blocks b d c a. Reach a / b / c d in 6 moves."
BLOCKS_STEPS = [
    "unstack a from c: b d c, hand a",
    "put down a: a / b d c",
    "unstack c from d: a / b d, hand c",
    "put down c: a / b d / c",
    "unstack d from b: a / b / c, hand d",
    "stack d on c: a / b / c d",
    "The answer is 6 moves.",
]
STORY = (
    "How many apples does Dan have? Ann has 12 apples. Ann has apples and Ben has 5 more. "
    "Cara has apples and Ann has 3 fewer. Ben has 9 coins. "
    "Dan has as many apples as Ann, Ben and Cara together. Ann has apples and Eve has half as many."
)
STORY_STEPS = [
    "Next, Ann has 12 apples and Ben has 5 more, so Ben has 12 + 5 = 17.",
    "Next, Ann has 12 apples, 3 fewer than Cara, so Cara has 12 + 3 = 15.",
    "Next, Ann has 12, Ben has 17 and Cara has 15. "
    "Dan has as many apples as Ann, Ben and Cara together. "
    "Then 12 + 17 = 29, 29 + 15 = 44, so Dan has 44.",
    "The answer is 44.",
]


def verdict(name: str, question: str, steps: list[str]) -> Verdict:
    return TASKS[name].check(question, STEP_BREAK.join(steps))


def replaced(steps: list[str], place: int, step: str) -> list[str]:
    return [*steps[:place], step, *steps[place + 1 :]]


def test_the_name_of_a_task_is_its_key() -> None:
    assert {name: task.name for name, task in TASKS.items()} == {name: name for name in TASKS}


@pytest.mark.slow
@EACH_TASK
def test_no_puzzle_is_in_two_splits(task: Task) -> None:
    keys = {split: {task.key(q) for q in task.questions(split, 300)} for split in SPLITS}
    for split in SPLITS:
        assert {split_of(key) for key in keys[split]} == {split}
    assert not keys["train"] & keys["dev"]
    assert not (keys["train"] | keys["dev"]) & keys["test"]


@EACH_TASK
def test_lessons_come_from_the_train_split(task: Task) -> None:
    rng = random.Random(3)
    assert {split_of(task.key(task.lesson(rng)[0])) for _ in range(60)} == {"train"}


@pytest.mark.parametrize("name", ["game24", "countdown"])
def test_another_target_over_the_same_numbers_stays_in_its_split(name: str) -> None:
    task, rng = TASKS[name], random.Random(4)
    for question in task.questions("test", 20):
        assert split_of(task.key(task.rival(question, rng))) == "test"


def test_renaming_blocks_or_people_does_not_make_a_new_puzzle() -> None:
    blocks, words = TASKS["blocksworld"], TASKS["wordproblem"]
    renamed = "Blocks a c b d. Reach d / a / b c in 6 moves."
    assert blocks.key(BLOCKS) == blocks.key(renamed)
    renamed_story = STORY.replace("Ann", "Kim").replace("Dan", "Ann").replace("apples", "shells")
    assert words.key(STORY) == words.key(renamed_story)
    assert words.key(STORY) != words.key(STORY.replace("12", "13"))


@EACH_TASK
def test_questions_are_deterministic_distinct_and_recognised_by_their_task_only(task: Task) -> None:
    questions = task.questions("dev", 40, seed=1)
    assert questions == task.questions("dev", 40, seed=1)
    assert questions[:10] == task.questions("dev", 10, seed=1)
    assert questions != task.questions("dev", 40, seed=2)
    assert len(set(questions)) == 40
    for question in questions:
        assert [name for name, candidate in TASKS.items() if candidate.matches(question)] == [
            task.name
        ]


@EACH_TASK
def test_teacher_derivations_always_check(task: Task) -> None:
    rng = random.Random(5)
    lessons = [task.lesson(rng) for _ in range(40)]
    lessons += [(question, task.solve(question, rng)) for question in task.questions("test", 20)]
    for question, steps in lessons:
        result = task.check(question, STEP_BREAK.join(steps))
        assert result == Verdict(True, (True,) * len(steps), ""), question
        assert len(steps) <= task.max_depth
        assert task.answer(STEP_BREAK.join(steps)) is not None


@EACH_TASK
def test_a_derivation_for_a_rival_question_is_not_right(task: Task) -> None:
    rng = random.Random(6)
    for question in task.questions("dev", 20):
        steps = task.solve(task.rival(question, rng), rng)
        result = task.check(question, STEP_BREAK.join(steps))
        assert not result.correct
        assert not result.steps[-1]


@EACH_TASK
def test_an_unfinished_derivation_is_hopeful_but_not_correct(task: Task) -> None:
    rng = random.Random(7)
    question = task.questions("dev", 1)[0]
    steps = task.solve(question, rng)[:-1]
    text = STEP_BREAK.join(steps)
    assert task.check(question, text) == Verdict(False, (True,) * len(steps), "no answer line")
    assert task.answer(text) is None


@EACH_TASK
@pytest.mark.parametrize("text", ["", "\n\n", "The answer is", "The answer is .", "é漢\n\n\n\n+"])
def test_nonsense_is_judged_not_raised(task: Task, text: str) -> None:
    result = task.check(task.questions("dev", 1)[0], text)
    assert not result.correct
    assert not any(result.steps)


@EACH_TASK
def test_a_foreign_question_is_refused(task: Task) -> None:
    assert not task.matches("What is love?")
    with pytest.raises(ValueError, match="not a"):
        task.check("What is love?", "The answer is 1.")


def test_game24_worked_example() -> None:
    assert verdict("game24", GAME, GAME_STEPS).correct
    swapped = ["13 - 9 = 4 (left: 10 4 4)", *GAME_STEPS[1:]]
    assert verdict("game24", GAME, swapped).correct


@pytest.mark.parametrize(
    ("place", "step", "reason"),
    [
        (0, "13 - 9 = 5 (left: 4 5 10)", "step 1: 13 - 9 is not 5"),
        (0, "12 - 9 = 3 (left: 3 4 10)", "step 1: 12 is not left"),
        (0, "9 - 13 = 4 (left: 4 4 10)", "step 1: 9 - 13 is not 4"),
        (0, "13 - 9 = 4 (left: 4 10)", "step 1: the numbers left are wrong"),
        (0, "13 / 9 = 1 (left: 1 4 10)", "step 1: 13 / 9 is not 1"),
        (0, "13 * 10 = 130 (left: 4 9 130)", "step 1: 24 is out of reach"),
        (0, "13 minus 9 is 4", "step 1: not a step"),
        (1, "4 * 4 = 16 (left: 10 16)", "step 2: 24 is out of reach"),
        (1, "4 - 4 = 0 (left: 0 10)", "step 2: 24 is out of reach"),
        (3, "The answer is 25.", "step 4: a wrong answer line"),
    ],
)
def test_game24_sees_each_fault_where_it_happens(place: int, step: str, reason: str) -> None:
    result = verdict("game24", GAME, replaced(GAME_STEPS, place, step))
    assert result.reason == reason
    assert result.steps == (True,) * place + (False,) * (4 - place)


def test_game24_does_not_divide_by_zero() -> None:
    step = "4 / 0 = 4 (left: 4 4)"
    assert "is not" in verdict("game24", "Use 0 4 4 8 to make 24.", [step]).reason


def test_a_derivation_goes_on_after_no_answer() -> None:
    assert not verdict("game24", GAME, [*GAME_STEPS, "The answer is 24."]).correct
    assert not verdict("game24", GAME, GAME_STEPS[2:]).correct


def test_reachable_agrees_with_brute_force_over_all_orders() -> None:
    def every(numbers: list[int]) -> set[int]:
        if len(numbers) == 1:
            return set(numbers)
        reachable: set[int] = set()
        for i in range(len(numbers)):
            for j in range(len(numbers)):
                if i != j:
                    rest = [n for k, n in enumerate(numbers) if k not in (i, j)]
                    a, b = numbers[i], numbers[j]
                    outcomes = [a + b, a * b] + ([a - b] if a >= b else [])
                    outcomes += [a // b] if b and a % b == 0 else []
                    for result in outcomes:
                        reachable |= every([*rest, result])
        return reachable

    for numbers in [(1, 5, 5, 5), (4, 9, 10, 13), (2, 3, 7, 7), (0, 1, 6, 8)]:
        reachable = every(list(numbers))
        assert all(number_puzzle.reachable(numbers, t) == (t in reachable) for t in range(120))


def test_countdown_uses_all_six_numbers() -> None:
    question = "Use 2 2 5 6 11 14 to make 20."
    steps = [
        "6 * 2 = 12 (left: 2 5 11 12 14)",
        "14 + 11 = 25 (left: 2 5 12 25)",
        "25 + 2 = 27 (left: 5 12 27)",
        "12 - 5 = 7 (left: 7 27)",
        "27 - 7 = 20 (left: 20)",
        "The answer is 20.",
    ]
    assert verdict("countdown", question, steps).correct
    early = verdict("countdown", question, ["14 + 6 = 20 (left: 2 2 5 11 20)", "The answer is 20."])
    assert early.steps == (True, False)


def test_blocksworld_worked_example() -> None:
    assert verdict("blocksworld", BLOCKS, BLOCKS_STEPS).correct


@pytest.mark.parametrize(
    ("place", "step", "reason"),
    [
        (0, "unstack c from d: b d, hand c", "step 1: no such move"),
        (0, "pick up b: d c a, hand b", "step 1: no such move"),
        (0, "unstack a from c: b c d, hand a", "step 1: the state shown is wrong"),
        (1, "stack a on c: b d c a", "step 2: the goal is out of reach"),
        (1, "unstack c from d: b d, hand c", "step 2: no such move"),
        (6, "The answer is 7 moves.", "step 7: a wrong answer line"),
        (6, "pick up a: b / c d, hand a", "step 7: the goal is out of reach"),
    ],
)
def test_blocksworld_sees_each_fault_where_it_happens(place: int, step: str, reason: str) -> None:
    result = verdict("blocksworld", BLOCKS, replaced(BLOCKS_STEPS, place, step))
    assert result.reason == reason
    assert result.steps == (True,) * place + (False,) * (7 - place)


def test_wordproblem_worked_example_and_a_legal_detour() -> None:
    assert verdict("wordproblem", STORY, STORY_STEPS).correct
    detour = "Next, Ann has 12 apples and Eve has half as many, so Eve has 12 / 2 = 6."
    assert verdict("wordproblem", STORY, [detour, *STORY_STEPS]).correct


@pytest.mark.parametrize(
    ("place", "step"),
    [
        (0, "Next, Ann has 12 apples and Ben has 5 more, so Ben has 12 + 5 = 18."),
        (0, "Next, Ann has 9 apples and Ben has 5 more, so Ben has 9 + 5 = 14."),
        (0, "Next, Ann has 12 apples and Ben has 6 more, so Ben has 12 + 6 = 18."),
        (1, "Next, Ann has 12 apples, 3 fewer than Cara, so Cara has 12 - 3 = 9."),
        (1, STORY_STEPS[2]),
        (1, STORY_STEPS[0]),
        (2, "The answer is 15."),
        (3, "The answer is 17."),
    ],
)
def test_wordproblem_sees_each_fault_where_it_happens(place: int, step: str) -> None:
    result = verdict("wordproblem", STORY, replaced(STORY_STEPS, place, step))
    assert result.steps == (True,) * place + (False,) * (4 - place)


def test_detours_cost_steps_and_steps_are_limited() -> None:
    friends = NAMES[1:13]
    facts = " ".join(f"Ann has apples and {name} has 1 more." for name in friends)
    question = f"How many apples does {friends[-1]} have? Ann has 1 apples. {facts}"
    steps = [
        f"Next, Ann has 1 apples and {name} has 1 more, so {name} has 1 + 1 = 2."
        for name in friends[:-1]
    ]
    result = verdict("wordproblem", question, steps)
    allowed = TASKS["wordproblem"].max_depth - 2
    assert result.steps == (True,) * allowed + (False,) * (len(steps) - allowed)


@EACH_TASK
def test_a_derivation_breaks_no_rule_finished_or_not(task: Task) -> None:
    question = task.questions("dev", 1)[0]
    steps = task.solve(question, random.Random(7))
    for end in range(1, len(steps) + 1):
        assert task.first_illegal(question, STEP_BREAK.join(steps[:end])) is None


@pytest.mark.parametrize(
    ("name", "question", "steps", "place"),
    [
        # a legal step to a dead end, where the checker stops; then 130 / 9, which is not whole
        (
            "game24",
            GAME,
            [
                "13 * 10 = 130 (left: 4 9 130)",
                "130 / 9 = 14 (left: 4 14)",
                "4 + 14 = 18 (left: 18)",
            ],
            1,
        ),
        (
            "game24",
            GAME,
            [GAME_STEPS[0], "4 * 4 = 16 (left: 10 16)", "16 + 10 = 26 (left: 26)"],
            None,
        ),
        ("game24", GAME, [*GAME_STEPS[:-1], "The answer is 25."], 3),
        ("blocksworld", BLOCKS, [BLOCKS_STEPS[0], "stack a on c: b d c a"], None),
        ("blocksworld", BLOCKS, [BLOCKS_STEPS[0], "stack a on c: b d c a", "pick up d: b"], 2),
        ("blocksworld", BLOCKS, [*BLOCKS_STEPS[:-1], "The answer is 7 moves."], 6),
        ("wordproblem", STORY, [STORY_STEPS[0], "Next, Ben has 3 apples."], 1),
        ("wordproblem", STORY, [*STORY_STEPS[:-1], "The answer is 17."], 3),
    ],
)
def test_the_first_step_that_breaks_a_rule(
    name: str, question: str, steps: list[str], place: int | None
) -> None:
    """A step into a dead end is legal, and the steps after it are checked too."""
    assert TASKS[name].first_illegal(question, STEP_BREAK.join(steps)) == place


def test_votes_read_the_text_and_do_not_verify_it() -> None:
    game, blocks, words = TASKS["game24"], TASKS["blocksworld"], TASKS["wordproblem"]
    first = "9 + 4 = 13 (left: 1 13)\n\n2 * 3 = 7 (left: 7)\n\nThe answer is 24."
    second = "3 * 2 = 7 (left: 7)\n\n4 + 9 = 13 (left: 13)\n\nThe answer is 24."
    assert game.answer(first) == game.answer(second) == "2 * 3 = 7; 4 + 9 = 13"
    assert game.answer("4 - 9 = 5 (left: 1 5)\n\nThe answer is 24.") == "4 - 9 = 5"
    moves = "pick up a: b, hand a\n\nstack a on b: nonsense\n\nThe answer is 2 moves."
    assert blocks.answer(moves) == "pick up a; stack a on b"
    assert blocks.answer("pick up a: b, hand a\n\nThe answer is up.") is None
    assert words.answer("Whatever.\n\nThe answer is 44.") == "44"
    assert words.answer("The answer is 44.\n\nThen more.") is None
