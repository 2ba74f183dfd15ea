"""Where a step goes wrong, letter by letter and token by token."""

import pytest

from models.tasks import TASKS
from models.train.batches import IGNORED, load_tokenizer
from models.train.faults import plan, right_letters
from models.train.labelled import Labelled, label_steps, step_ids
from models.train.rows import IN_PLACE, MOVES_TO_GO, labels_within, scored_row
from models.train.tokenizer import TAG

QUESTION = (
    "How many cards does Ann have? Olga has 9 cards. Olga has cards and Hana has 17 more. "
    "Hana has cards and Ann has 10 fewer."
)
FIRST = "Next, Olga has 9 cards and Hana has 17 more, so Hana has 9 + 17 = 26."


@pytest.mark.parametrize(
    ("steps", "right"),
    [
        (["Next, Olga has 9 cards and Ann has 10 fewer."], "Next, Olga has 9 cards and "),
        ([FIRST.replace("26", "27")], FIRST[:-2]),
        ([FIRST, "The answer is 26."], ""),
        ([FIRST, FIRST], "Next, "),
        ([FIRST], FIRST),
    ],
)
def test_a_step_is_right_up_to_where_no_right_one_goes_on(steps: list[str], right: str) -> None:
    """Another person, a wrong sum, an early answer and a repeated step; a right step is whole."""
    assert right_letters(QUESTION, steps) == len(right)


@pytest.mark.parametrize(
    ("steps", "right"),
    [
        (["9 / 4 = 3 (left: 3 8 9)"], "9 / "),
        (["9 * 4 = 38 (left: 8 9 38)"], "9 * 4 = 3"),
        (["4 * 9 = 36 (left: 8 9 35)"], "4 * 9 = 36 (left: 8 9 3"),
        (["9 - 4 = 5 (left: 5 8 9)", "9 - 5 = 4 (left: 4 4 8)"], "9 - 5 = 4 (left: 4 "),
        (["8 - 4 = 4 (left: 4 9 9)"], "8 - 4 = 4 (left: 4 9 9)"),
    ],
)
def test_a_sum_is_right_up_to_its_wrong_number(steps: list[str], right: str) -> None:
    """A remainder, a wrong product and wrong numbers left are faults; a dead end is legal."""
    assert right_letters("Use 4 8 9 9 to make 24.", steps) == len(right)


BLOCKS = "Blocks a b / c. Reach a / c b in 2 moves."


@pytest.mark.parametrize(
    ("step", "right"),
    [
        ("unstack a from b: a / c, hand b", "unstack "),
        ("unstack b from a: a / c, hand c", "unstack b from a: a / c, hand "),
        ("pick up c: a b, hand c", "pick up c: a b, hand c"),
    ],
)
def test_a_move_is_right_up_to_where_the_state_is_not_so(step: str, right: str) -> None:
    """Moving a covered block and a wrong state are faults; a wasted move is legal."""
    assert right_letters(BLOCKS, [step]) == len(right)


def test_a_plan_is_followed_up_to_the_first_illegal_move() -> None:
    """For each state: the shortest plan's length, and whether each block and all below it stay."""
    steps = ["pick up c: a b, hand c", "put down c: a b / c", "unstack a from b: a, hand b"]
    assert plan(BLOCKS, steps) == [(3, [True, False, False]), (2, [True, False, True])]


def test_another_question_is_named() -> None:
    with pytest.raises(ValueError, match="no task: 'Use 4'"):
        right_letters("Use 4", ["4 + 4 = 8"])
    with pytest.raises(ValueError, match="not a blocks world: 'Use 4'"):
        plan("Use 4", [])


def labelled(*steps: str, task: str = "wordproblem", question: str = QUESTION) -> Labelled:
    """A reply with its labels, as in the reward model's samples."""
    tokenizer = load_tokenizer()
    (step_break,) = tokenizer.encode("\n\n")
    ids = tokenizer.encode("\n\n".join(steps))
    return label_steps(tokenizer, TASKS[task], question, step_ids(ids, step_break))


def test_the_label_is_at_the_word_that_is_wrong() -> None:
    """Words behind it have no label; each tag has the label of its whole step."""
    tokenizer = load_tokenizer()
    row = labelled(FIRST.replace("17 more", "18 more"), "The answer is 1.")
    within = labels_within(tokenizer, row)
    fault = within[0].index(1)
    assert tokenizer.decode([row.steps[0][fault]]) == " 18"
    assert set(within[0][:fault]) == {0}
    assert {*within[0][fault + 1 :], *within[1]} == {IGNORED}
    scored = scored_row(tokenizer, row, within)
    (tag,) = tokenizer.encode(TAG)
    at_tags = [
        label for token, label in zip(scored.ids, scored.labels, strict=True) if token == tag
    ]
    assert at_tags == [1, 1]
    assert scored.labels.count(1) == 1 + 2


def test_a_sound_step_that_leads_nowhere_has_labels_at_its_tag_alone() -> None:
    """Its tokens are not labelled, since none of its words is wrong."""
    row = labelled(FIRST)._replace(labels=[False])
    assert set(labels_within(load_tokenizer(), row)[0]) == {IGNORED}


def test_blocks_are_labelled_where_a_step_shows_them() -> None:
    """Every second right step has labels for its blocks, so that the others can have labels for
    wrong words; after a wasted move all steps have them."""
    steps = ["unstack b from a: a / c, hand b", "put down b: a / b / c", "pick up a: b / c, hand a"]
    row = labelled(*steps, "The answer is 3 moves.", task="blocksworld", question=BLOCKS)
    assert row.labels == [True, False, False, False]
    first, second, third, _ = labels_within(load_tokenizer(), row)
    stays, goes = IN_PLACE, IN_PLACE + 1
    assert [label for label in first if label] == [stays, stays, goes, MOVES_TO_GO + 1]
    assert [label for label in second if label != IGNORED] == [stays, goes, stays, MOVES_TO_GO + 2]
    labels = [label for label in third if label != IGNORED]
    assert labels == [goes, stays, goes, MOVES_TO_GO + 3]
