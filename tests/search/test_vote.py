"""Votes, worked by hand. A finished step's text is its answer; ``-`` is none."""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import log, prod

import pytest
from hypothesis import given
from hypothesis import strategies as st

from search.engine import RewardMissing
from search.outcome import AnswerClass
from search.spec import SearchSpec, VoteName
from search.tree import Finish, Tree
from search.vote import (
    CONFIDENCES,
    AnswerClasses,
    Ballot,
    cut_short,
    hold_vote,
    path_score,
    vote_name,
)
from tests.search.scripted_engine import ScriptedEngine, grow
from tests.search.trees import END, LIMIT, STEP, tree_of


def last_letter(text: str) -> str | None:
    """The answer: a reply's last character, unless that is a dash."""
    return None if text[-1] == "-" else text[-1]


def replies(*pairs: tuple[str, float | None]) -> Tree:
    """One-step trajectories with these answers and rewards, as nodes 1, 2, ..."""
    return tree_of(*((0, answer, END, reward) for answer, reward in pairs))


def vote(tree: Tree, rule: VoteName) -> Ballot:
    """The vote by ``rule``."""
    return hold_vote(tree, rule, AnswerClasses(last_letter).of(tree))


def test_weighted_majority_adds_last_rewards() -> None:
    """b weighs .5 + .45 = .95 against a's .9; its better member is the reply."""
    ballot = vote(replies(("a", 0.9), ("b", 0.45), ("b", 0.5)), "weighted_majority")
    classes = (AnswerClass("b", 0.95, 2, 3), AnswerClass("a", 0.9, 1, 1))
    assert ballot == Ballot("b", 3, classes, "weighted_majority")


def test_majority_counts() -> None:
    """Three low rewards outnumber two high ones; the reply is the class's best by reward."""
    ballot = vote(replies(("a", 0.9), ("a", 0.9), ("b", 0.1), ("b", 0.2), ("b", 0.1)), "majority")
    assert ballot == Ballot(
        "b", 4, (AnswerClass("b", 3, 3, 4), AnswerClass("a", 2, 2, 1)), "majority"
    )


def test_majority_needs_no_rewards() -> None:
    """Without rewards the reply is the class's first member."""
    ballot = vote(replies(("a", None), ("b", None), ("b", None)), "majority")
    assert (ballot.answer, ballot.chosen) == ("b", 2)
    assert vote(replies(("a", 0.0), ("a", 0.5)), "majority").chosen == 2


PATHS = (
    (0, "p\n\n", STEP, 0.9),  # 1
    (0, "q\n\n", STEP, 0.5),  # 2
    (0, "r\n\n", STEP, 0.7),  # 3
    (1, "a", END, 0.4),  # 4: min .4, product .36, mean .65
    (2, "b", END, 0.65),  # 5: min .5, product .325, mean .575
    (3, "c", END, 0.45),  # 6: min .45, product .315, mean .575
)


@pytest.mark.parametrize(
    ("rule", "chosen", "weights"),
    [
        ("best_last", 5, {"b": 0.65, "c": 0.45, "a": 0.4}),
        ("best_min", 5, {"b": 0.5, "c": 0.45, "a": 0.4}),
        ("best_prod", 4, {"a": 0.36, "b": 0.325, "c": 0.315}),
        ("best_mean", 4, {"a": 0.65, "b": 0.575, "c": 0.575}),
    ],
)
def test_best_by_path(rule: VoteName, chosen: int, weights: dict[str, float]) -> None:
    """last, min, product and mean of a trajectory's rewards each pick their own winner."""
    ballot = vote(tree_of(*PATHS), rule)
    assert ballot.chosen == chosen
    assert [c.answer for c in ballot.answers] == list(weights)
    assert [c.weight for c in ballot.answers] == pytest.approx(list(weights.values()))


@pytest.mark.parametrize(
    ("rule", "chosen"), [("best_min", 3), ("best_last", 4), ("weighted_majority", 4)]
)
def test_the_reply_is_the_best_member_by_the_rules_own_score(rule: VoteName, chosen: int) -> None:
    """Both have answer a: 3 has .9 and .5 on its path, 4 has .2 and .8."""
    steps = ((0, "p", STEP, 0.9), (0, "q", STEP, 0.2), (1, "a", END, 0.5), (2, "a", END, 0.8))
    assert vote(tree_of(*steps), rule).chosen == chosen


def test_best_takes_the_best_member_not_the_sum() -> None:
    """Under ``best_last`` replies of .5 and .3 do not beat one of .6, but .5 and .7 do."""
    ballot = vote(replies(("a", 0.5), ("a", 0.3), ("b", 0.6)), "best_last")
    assert ballot.answers == (AnswerClass("b", 0.6, 1, 3), AnswerClass("a", 0.5, 2, 1))
    assert ballot.chosen == 3
    assert vote(replies(("a", 0.5), ("a", 0.7), ("b", 0.6)), "best_last").chosen == 2


def test_equal_weights_go_to_the_larger_class() -> None:
    """.8 against .4 + .4: the class with two members wins."""
    ballot = vote(replies(("a", 0.8), ("b", 0.4), ("b", 0.4)), "weighted_majority")
    assert (ballot.answer, ballot.chosen) == ("b", 2)


def test_equal_classes_go_to_the_lowest_id() -> None:
    """Everything equal: the class, and in it the member, with the lowest node id."""
    ballot = vote(replies(("b", 0.5), ("a", 0.5), ("a", 0.5), ("b", 0.5)), "weighted_majority")
    assert (ballot.answer, ballot.chosen) == ("b", 1)


def test_weights_are_added_without_rounding_noise() -> None:
    """.1 + .2 weighs as much as .3, so that the larger class wins; in floats it is more."""
    tied = replies(("b", 0.3), ("a", 0.1), ("a", 0.2))
    assert {c.weight for c in vote(tied, "weighted_majority").answers} == {0.3}


@pytest.mark.parametrize(
    ("rule", "first", "second", "weight"),
    [
        ("best_mean", (0.3, 0.3), (0.2, 0.4), 0.3),  # .30000000000000004 in floats
        ("best_mean", (0.7,), (0.6, 0.7, 0.8), 0.7),
        ("best_prod", (0.7, 0.7, 0.1), (0.49, 0.1), 0.049),
        ("best_prod", (0.6, 0.2), (0.3, 0.4), 0.12),
    ],
)
def test_equal_paths_are_a_tie(
    rule: VoteName, first: tuple[float, ...], second: tuple[float, ...], weight: float
) -> None:
    """Scores that are equal in exact arithmetic tie: the reply is the one with the lower id."""
    for paths in (first, second), (second, first):
        tree = tree_of()
        ends = [down(tree, rewards, answer) for rewards, answer in zip(paths, "ab", strict=True)]
        ballot = vote(tree, rule)
        assert (ballot.answer, ballot.chosen) == ("a", ends[0])
        assert [answer.weight for answer in ballot.answers] == [pytest.approx(weight, abs=1e-9)] * 2


def down(tree: Tree, rewards: tuple[float, ...], answer: str) -> int:
    """A path with these rewards that ends with an answer, and its last node."""
    node = 0
    for i, reward in enumerate(rewards):
        last = i == len(rewards) - 1
        step = tree.add(node, (len(tree),), answer if last else "s", END if last else STEP)
        step.reward, node = reward, step.id
    return node


@given(
    paths=st.lists(st.lists(st.integers(0, 7), min_size=1, max_size=4), min_size=2, max_size=12),
    rule=st.sampled_from(["best_min", "best_prod", "best_mean"]),
)
def test_the_best_path_is_the_first_of_the_best(paths: list[list[int]], rule: VoteName) -> None:
    """The vote agrees with comparing tenths as whole numbers, without fractions or floats."""
    tree = tree_of()
    ends = [down(tree, tuple(tenth / 10 for tenth in path), "a") for path in paths]

    def beats(first: list[int], second: list[int]) -> bool:
        if rule == "best_min":
            return min(first) > min(second)
        if rule == "best_mean":
            return sum(first) * len(second) > sum(second) * len(first)
        return prod(first) * 10 ** len(second) > prod(second) * 10 ** len(first)

    best = 0
    for i, path in enumerate(paths):
        if beats(path, paths[best]):
            best = i
    assert vote(tree, rule).chosen == ends[best]


def test_replies_without_an_answer_do_not_vote() -> None:
    """The best reward counts for nothing if there is no answer in the reply."""
    ballot = vote(replies(("-", 1.0), ("a", 0.1)), "best_last")
    assert (ballot.answer, ballot.chosen) == ("a", 2)


def test_cut_trajectories_vote_only_with_an_answer() -> None:
    """A cut trajectory counts if it has an answer."""
    tree = tree_of((0, "a", END, 0.2), (0, "b", LIMIT, 0.6), (0, "-", LIMIT, 0.9))
    assert vote(tree, "weighted_majority").answers == (
        AnswerClass("b", 0.6, 1, 2),
        AnswerClass("a", 0.2, 1, 1),
    )


def test_no_answer_falls_back_to_the_best_reward_and_says_so() -> None:
    """Only replies that ended count, cut ones only if there is no other. Ties: the lower id. A
    reward of 0 is a reward."""
    tree = tree_of(
        (0, "-", END, 0.2), (0, "x-", END, 0.6), (0, "y-", END, 0.6), (0, "-", LIMIT, 1.0)
    )
    assert vote(tree, "majority") == Ballot(None, 2, (), "best_last (no reply has an answer)")
    cut_tree = tree_of((0, "-", LIMIT, 0.2), (0, "-", LIMIT, 0.6))
    assert vote(cut_tree, "majority").chosen == 2
    assert vote(replies(("-", 0.0), ("-", 0.5)), "majority").chosen == 2


def test_no_answer_and_no_reward_falls_back_to_the_mean_log_probability() -> None:
    """A token counts as a token: (-1 - 2*4)/5 = -1.8 a token beats -2.25; ties: the lower id. Five
    tokens at -1.5 each, -7.5 together, beat two at -2 each, -4 together."""
    lines = ((0, "p", STEP, None), (1, "qrs-", END, None), (0, "long-", END, None))
    ballot = vote(tree_of(*lines, logprobs=(-1.0, -2.0, -2.25)), "majority")
    assert ballot == Ballot(None, 2, (), "best_logprob (no reply has an answer)")
    assert vote(tree_of(*lines, logprobs=(-1.0, -2.0, -1.6)), "majority").chosen == 3
    short = tree_of((0, "s-", END, None), (0, "long-", END, None), logprobs=(-2.0, -1.5))
    assert vote(short, "majority").chosen == 2
    assert vote(replies(("-", None), ("-", None)), "majority").chosen == 1
    assert vote(replies(("-", None), ("-", 0.5)), "majority").chosen == 1


def test_no_answer_no_reward_and_an_unknown_log_probability_is_the_first() -> None:
    """If a log-probability is unknown the first reply is chosen."""
    lines = ((0, "p-", END, None), (0, "q-", END, None), (0, "r-", END, None))
    ballot = vote(tree_of(*lines, logprobs=(-2.0, None, -1.0)), "majority")
    assert ballot == Ballot(None, 1, (), "first (no reply has an answer)")


@pytest.mark.parametrize(
    ("rule", "score"), [("confidence", "0.3536"), ("lowest_confidence", "0.25")]
)
def test_a_trajectorys_confidence_is_its_score(rule: VoteName, score: str) -> None:
    """Two steps of a token, of 1/2 and 1/4: the geometric mean is 0.35355, the least 1/4."""
    tree = tree_of((0, "a", STEP, None), (1, "1", END, None), logprobs=(log(1 / 2), log(1 / 4)))
    assert path_score(tree, rule, tree[2]) == Fraction(score)


def test_nothing_finished_chooses_nothing() -> None:
    """An open branch is not a reply."""
    ballot = vote(tree_of((0, "a", STEP, 0.5)), "weighted_majority")
    assert ballot == Ballot(None, None, (), "none (no trajectory finished)")


def test_what_a_budget_cut_short_is_the_best_open_path() -> None:
    """The best is by the last reward, ties to the lower id; without rewards by the mean
    log-probability. Pruned and inner nodes do not count; without any step there is no reply."""
    why = "(no trajectory finished)"
    lines = ((0, "a", STEP, 0.9), (0, "b", STEP, 0.5), (1, "c", STEP, 0.5), (0, "d", STEP, 0.8))
    tree = tree_of(*lines)
    assert cut_short(tree).chosen == 4
    tree.prune(4)
    assert cut_short(tree) == Ballot(None, 2, (), f"best_last {why}")
    bare = tree_of((0, "a", STEP, None), (0, "b", STEP, 0.5), logprobs=(-1.0, -2.0))
    assert cut_short(bare) == Ballot(None, 1, (), f"best_logprob {why}")
    assert cut_short(Tree([1])) == Ballot(None, None, (), f"none {why}")


def test_when_every_branch_has_died_the_last_of_them_speaks() -> None:
    """One branch died at once, the other after a step: that step is the reply, not its loop."""
    died = (0, "\n\n", Finish.EMPTY, None), (2, "a", Finish.LOOP, None)
    tree = tree_of(died[0], (0, "a", STEP, 0.1), died[1])
    assert vote(tree, "majority") == Ballot(None, 2, (), "last (every branch died)")


@pytest.mark.parametrize("rule", ["weighted_majority", "best_last", "best_min"])
def test_a_missing_reward_is_an_error(rule: VoteName) -> None:
    """A rule that counts rewards names the node that has none."""
    with pytest.raises(RewardMissing, match=f"node 2 has no reward; vote {rule}"):
        vote(replies(("a", 0.5), ("a", None)), rule)


def test_the_rule_follows_the_policy_unless_given() -> None:
    """Most policies use weighted majority, majority without scores; the client's rule wins."""
    assert vote_name(SearchSpec(policy="rebase")) == "weighted_majority"
    assert vote_name(SearchSpec(policy="self_consistency")) == "majority"
    assert vote_name(SearchSpec(policy="self_consistency", vote="best_min")) == "best_min"
    assert vote_name(SearchSpec(policy="beam")) == "best_last"
    assert vote_name(SearchSpec(policy="beam", filter_duplicates=False)) == "weighted_majority"
    assert vote_name(SearchSpec(policy="beam", consensus=0.9)) == "weighted_majority"
    assert vote_name(SearchSpec(policy="dora")) == "lineages"


def near(first: str, second: str) -> bool:
    """Equal to within one: not transitive."""
    return abs(int(first) - int(second)) <= 1


def classes(answers: str, same: Callable[[str, str], bool] | None = None) -> dict[str, list[int]]:
    """Node ids by class."""
    tree = replies(*((answer, 1.0) for answer in answers))
    members_by_answer = AnswerClasses(last_letter, same).of(tree)
    return {name: [node.id for node in members] for name, members in members_by_answer.items()}


def test_equal_answers_make_a_class_in_node_order() -> None:
    """An answer joins the first class whose first member it equals: 2 joins 1, 3 is not near 1."""
    assert classes("1232") == {"1": [1], "2": [2, 4], "3": [3]}
    assert classes("1232", near) == {"1": [1, 2, 4], "3": [3]}
    assert classes("2132", near) == {"2": [1, 2, 3, 4]}
    assert classes("3124", near) == {"3": [1, 3, 4], "1": [2]}


def test_an_answer_is_compared_once() -> None:
    """An answer spelled as an earlier one joins its class without comparing, which may be slow."""
    comparisons: list[tuple[str, str]] = []
    classes("12123", lambda first, second: comparisons.append((first, second)) is not None)
    assert comparisons == [("1", "2"), ("1", "3"), ("2", "3")]


@pytest.mark.promise(
    "Votes group equal answers by node order alone, whether during the search or at its end."
)
@given(st.text("123456789", max_size=12), st.sets(st.integers(0, 12)))
def test_classes_do_not_depend_on_when_they_are_asked_for(answers: str, moments: set[int]) -> None:
    """Classes are the same, in the same order, whether built as the tree grows or at once. An
    answer joins the first class whose first member it equals."""
    tree = tree_of()
    growing = AnswerClasses(last_letter, near)
    for i, answer in enumerate(answers):
        if i in moments:
            growing.of(tree)
        tree.add(0, (ord(answer),), answer, END).reward = 0.5
    once = AnswerClasses(last_letter, near).of(tree)
    expected: dict[str, list[int]] = {}
    spelled: dict[str, str] = {}
    for node, answer in enumerate(answers, start=1):
        opened = [name for name in expected if near(name, answer)]
        name = spelled.setdefault(answer, (opened or [answer])[0])
        expected.setdefault(name, []).append(node)
    assert {name: [node.id for node in members] for name, members in once.items()} == expected
    assert list(growing.of(tree).items()) == list(once.items())


def test_a_class_is_called_by_its_first_members_answer() -> None:
    """1 and 2 are one class of weight 1.3; its best member is the reply."""
    tree = replies(("1", 0.6), ("5", 0.9), ("2", 0.7))
    ballot = hold_vote(tree, "weighted_majority", AnswerClasses(last_letter, near).of(tree))
    assert ballot.answers == (AnswerClass("1", 1.3, 2, 3), AnswerClass("5", 0.9, 1, 2))
    assert (ballot.answer, ballot.chosen) == ("1", 3)


def test_lineages_count_once_for_an_answer_by_hand() -> None:
    """Below ``a`` three times 1 (.9, .8, .7), below ``b`` and ``c`` once 2 each (.6, .5).

    ``c`` has 1 too (.1). Weighted majority: 2.5 to 1.1. By lineages: .9 + .1 to .6 + .5.
    """
    tree = tree_of(
        (0, "a", STEP, 0.5),
        (0, "b", STEP, 0.5),
        (0, "c", STEP, 0.5),
        (1, "1", END, 0.9),
        (1, "1", END, 0.8),
        (1, "1", END, 0.7),
        (2, "2", END, 0.6),
        (3, "2", END, 0.5),
        (3, "1", END, 0.1),
    )
    classes = AnswerClasses(last_letter).of(tree)
    by_weight = hold_vote(tree, "weighted_majority", classes)
    assert (by_weight.answer, by_weight.answers[0].weight) == ("1", 2.5)
    ballot = hold_vote(tree, "lineages", classes)
    assert [(c.answer, c.weight, c.count) for c in ballot.answers] == [("2", 1.1, 2), ("1", 1.0, 4)]
    assert ballot.chosen == 7


def test_a_lineage_without_a_reward_is_named() -> None:
    """The error is that of every vote that reads rewards."""
    tree = tree_of((0, "1", END, None), (0, "1", END, 0.5))
    with pytest.raises(RewardMissing, match="vote lineages needs one"):
        hold_vote(tree, "lineages", AnswerClasses(last_letter).of(tree))


def test_the_best_of_a_lineage_wherever_it_stands() -> None:
    """A lineage counts its best, .7 after .2, and one with reward 0 adds nothing."""
    tree = tree_of((0, "a", STEP, 0.5), (0, "1", END, 0.0), (1, "1", END, 0.2), (1, "1", END, 0.7))
    (answer,) = hold_vote(tree, "lineages", AnswerClasses(last_letter).of(tree)).answers
    assert (answer.weight, answer.count, answer.reply) == (0.7, 3, 4)


async def test_of_chains_the_lineages_are_the_weighted_majority() -> None:
    """Chains share no step, so lineages give the same answers and weights."""
    for seed in range(10):
        spec = SearchSpec(policy="best_of_n", width=9, seed=seed, max_depth=8)
        plain = await grow(ScriptedEngine(), spec)
        by_lineage = await grow(ScriptedEngine(), spec.model_copy(update={"vote": "lineages"}))
        assert by_lineage.answers == plain.answers
        assert by_lineage.vote == "lineages"


def test_confidences_by_hand() -> None:
    """Node 3's ``ab1`` has 1/2 a token, then 1/8: the geometric mean is (1/4 * 1/8) ** (1/3) =
    0.3150, the least sure step's 1/8. Node 4 has 1/4 and 1/4, 0.25 both. Node 5 alone has 2/5.

    By ``confidence`` 1 and 2 weigh .3150 + .25 to .4; by ``lowest_confidence`` .125 + .25 to .4.
    """
    halves = tuple(map(log, (1 / 2, 1 / 4, 1 / 8, 1 / 4, 2 / 5)))
    tree = tree_of(
        (0, "ab", STEP, None),
        (0, "c", STEP, None),
        (1, "1", END, None),
        (2, "1", END, None),
        (0, "2", END, None),
        logprobs=halves,
    )
    mean = vote(tree, "confidence")
    assert [(c.answer, c.weight, c.reply) for c in mean.answers] == [("1", 0.565, 3), ("2", 0.4, 5)]
    least = vote(tree, "lowest_confidence")
    assert [(c.answer, c.weight, c.reply) for c in least.answers] == [
        ("2", 0.4, 5),
        ("1", 0.375, 4),
    ]
    assert least.chosen == 5


@pytest.mark.parametrize("rule", CONFIDENCES)
def test_confidences_need_every_steps_log_probability(rule: VoteName) -> None:
    """A step without a log-probability, which some servers do not return, is an error."""
    tree = tree_of((0, "a", STEP, None), (1, "1", END, None), logprobs=(None, -1.0))
    with pytest.raises(RewardMissing, match=f"node 2 has no log-probability; vote {rule}"):
        vote(tree, rule)


async def test_confidences_need_no_reward_model() -> None:
    """Without a reward model these votes work, on the same tree as a majority."""
    spec = SearchSpec(policy="self_consistency", width=5, seed=2, max_depth=8)
    plain = await grow(ScriptedEngine(scores=False), spec)
    for rule in CONFIDENCES:
        outcome = await grow(ScriptedEngine(scores=False), spec.model_copy(update={"vote": rule}))
        assert outcome.vote == rule
        assert [n.tokens for n in outcome.tree.nodes] == [n.tokens for n in plain.tree.nodes]
        assert all(0 < answer.weight <= answer.count for answer in outcome.answers)
