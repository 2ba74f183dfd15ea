"""Consensus: a search ends early only when its answer is settled."""

from __future__ import annotations

from collections import Counter
from fractions import Fraction
from math import comb, log

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from search.engine import Branch, RewardMissing
from search.outcome import Outcome
from search.policies.registry import POLICIES
from search.spec import PolicyName, SearchSpec, StopReason, VoteName
from search.stop import consensus_met, posterior
from search.tree import Tree
from search.vote import VOTE_SCORES, AnswerClasses
from tests.search.scripted_engine import ScriptedEngine, decode, dice, grow
from tests.search.trees import END, STEP, Line, tree_of


def met(
    tree: Tree, vote: VoteName, consensus: object, growing: tuple[int, ...] = (0,), **dials: object
) -> bool:
    """Whether a tree is settled under the spec's fields; a text's last character is its answer."""
    spec = SearchSpec.model_validate({"vote": vote, "consensus": consensus, **dials})
    return consensus_met(tree, spec, AnswerClasses(lambda text: text[-1]).of(tree), growing)


def ends(*pairs: tuple[str, float]) -> list[Line]:
    """One-step trajectories with these answers and rewards."""
    return [(0, answer, END, reward) for answer, reward in pairs]


def votes(answers: str) -> Tree:
    """Trajectories with these answers, each of reward 1."""
    return tree_of(*ends(*((answer, 1.0) for answer in answers)))


@pytest.mark.parametrize(
    ("answers", "width", "settled"),
    [
        ("aaa", 5, True),  # 3 : 2 at worst
        ("aaa", 6, True),  # 3 : 3, but a came first
        ("aaa", 7, False),  # 3 : 4
        ("aab", 4, True),  # 2 : 2, but a came first
        ("baa", 4, False),  # 2 : 2, and b came first
        ("abbb", 5, True),  # 3 : 2
        ("abbb", 6, False),  # 3 : 3, and a came first
        ("aaa", 3, False),  # no vote is missing: the search ends by itself
        ("", 3, False),  # there is no vote yet
    ],
)
def test_certain_under_majority(answers: str, width: int, settled: bool) -> None:
    """At worst every missing vote goes to one rival; of equal classes the lowest id wins."""
    assert met(votes(answers), "majority", "certain", width=width) is settled


@pytest.mark.parametrize(
    ("pairs", "width", "settled"),
    [
        ([("a", 0.9), ("a", 0.3)], 3, True),  # 1.2 : 1
        ([("a", 0.9), ("a", 0.3)], 4, False),  # 1.2 : 2
        ([("a", 0.6), ("a", 0.4)], 3, True),  # 1 : 1, and two members against one
        ([("a", 1.0)], 2, True),  # 1 : 1, one member each, and a came first
        ([("b", 0.0), ("a", 1.0)], 3, False),  # 1 : 1, and b would have two members
        ([("b", 0.3), ("a", 0.7), ("a", 0.6)], 4, False),  # 1.3 : 1.3, two each, and b came first
        ([("a", 0.7), ("b", 0.3), ("a", 0.6)], 4, True),  # 1.3 : 1.3, two each, and a came first
        ([("b", 0.3), ("a", 0.7), ("a", 0.6001)], 4, True),  # 1.3001 : 1.3
    ],
)
def test_certain_under_weighted_majority(
    pairs: list[tuple[str, float]], width: int, settled: bool
) -> None:
    """An unfinished trajectory weighs at most 1; ties go to more members, then the lowest id."""
    assert met(tree_of(*ends(*pairs)), "weighted_majority", "certain", width=width) is settled


@pytest.mark.parametrize(
    ("pairs", "settled"),
    [
        ([("a", 0.9999)], False),  # a newcomer may score 1
        ([("a", 1.0)], True),  # and then it came second
        ([("a", 1.0), ("b", 0.2)], False),  # b would have the same score and two members
        ([("a", 1.0), ("a", 0.1), ("b", 0.2)], True),  # two each, and a came first
    ],
)
def test_certain_under_best_last(pairs: list[tuple[str, float]], settled: bool) -> None:
    """The last reward of an unfinished trajectory can be 1, whatever its other rewards are."""
    assert met(tree_of(*ends(*pairs)), "best_last", "certain", width=len(pairs) + 1) is settled


@pytest.mark.parametrize(
    ("vote", "reward", "settled"),
    [
        ("best_min", 0.51, True),  # the open leaf's path holds a .5 already
        ("best_min", 0.5, True),  # a tie goes to the first
        ("best_min", 0.49, False),
        ("best_prod", 0.41, True),  # .5 * .8 = .4
        ("best_prod", 0.39, False),
        ("best_mean", 0.83, True),  # (.5 + .8 + 1 + 1)/4 = .825 with two steps to come
        ("best_mean", 0.825, False),  # a mean that may be tied has not won
        ("best_mean", 0.82, False),
    ],
)
def test_paths_that_look_at_every_step_bound_what_is_out(
    vote: VoteName, reward: float, settled: bool
) -> None:
    """The open leaf, node 3, has .5 and .8 on its path; at most two steps of reward 1 follow."""
    tree = tree_of((0, "s", STEP, 0.5), (0, "a", END, reward), (1, "t", STEP, 0.8))
    assert met(tree, vote, "certain", (3,), width=2, max_depth=4) is settled


def test_a_step_without_a_reward_is_named() -> None:
    """The error names the node and the vote that needs its reward, as the vote itself does."""
    tree = tree_of((0, "a", END, 0.6), (0, "s", STEP, None))
    with pytest.raises(RewardMissing, match="node 2 has no reward; vote best_min needs one"):
        met(tree, "best_min", "certain", (2,), width=2)


def test_what_will_not_grow_is_out_of_the_race() -> None:
    """Leaf 2 could still reach .9 unless it is pruned; leaf 3 cannot pass .4."""
    tree = tree_of((0, "a", END, 0.6), (0, "s", STEP, 0.9), (0, "t", STEP, 0.4))
    assert met(tree, "best_min", "certain", (3,), width=2) is True
    assert met(tree, "best_min", "certain", (2, 3), width=2) is False


async def test_what_the_plan_prunes_is_given_up() -> None:
    """Leaf ``u`` could still beat the answer's .4, but the third plan prunes it; ``t`` cannot.

    Of width 5 one child ended, two died; then ``b`` has three children, of which two end, and ``a``
    one; the two places left go to ``t``, whose last reward is the best, and whose minimum is .1.
    """
    replies = {
        "Q": ["The answer is 1.", "a\n\n", "b\n\n", "\n\n", "\n\n"],
        "Qa\n\n": ["t\n\n"],
        "Qb\n\n": ["u\n\n", "The answer is 2.", "The answer is 2."],
    }
    rewards = {"The answer is 1.": 0.4, "The answer is 2.": 0.2, "a": 0.1, "b": 0.9}
    rewards |= {"t": 0.95, "u": 0.5}
    engine = ScriptedEngine(
        lambda branch: replies[decode(branch.tokens)][branch.child],
        lambda texts: rewards[texts[-1].strip()],
    )
    spec = SearchSpec(
        width=5, seed=1, reward_temperature=10.0, vote="best_min", consensus="certain"
    )
    outcome = await grow(engine, spec)
    assert (outcome.stop_reason, outcome.stats.rounds) == (StopReason.CONSENSUS, 2)
    assert outcome.answer == "1"


@pytest.mark.parametrize(("first", "second"), [(0, 0), (1, 0), (4, 0), (5, 2), (2, 5), (40, 31)])
def test_the_posterior_is_the_integral_of_the_beta_density(first: int, second: int) -> None:
    """P(p > 1/2) of Beta(a+1, b+1): p^a (1-p)^b from 1/2 to 1 over that from 0 to 1, exactly."""
    signs = [Fraction((-1) ** k * comb(second, k), first + k + 1) for k in range(second + 1)]
    above = sum(term * (1 - Fraction(1, 2 ** (first + k + 1))) for k, term in enumerate(signs))
    assert posterior(first, second) == pytest.approx(float(above / sum(signs)), abs=1e-12)


def test_the_posterior_by_hand() -> None:
    """After one vote it is 3/4, for equal counts 1/2, for four votes to none 31/32."""
    assert [posterior(1, 0), posterior(3, 3), posterior(4, 0)] == [0.75, 0.5, 31 / 32]


@pytest.mark.parametrize(
    ("answers", "threshold", "settled"),
    [
        ("a", 0.75, True),  # P(Binomial(2, 1/2) <= 1) = 3/4
        ("aaaa", 0.95, True),  # 31/32 = .969
        ("aaab", 0.95, False),  # P(Binomial(5, 1/2) <= 3) = 26/32
        ("aaab", 0.8, True),
        ("abab", 0.51, False),
        ("aaaabc", 0.9, False),  # against the largest other class: P(Bin(6) <= 4) = 57/64 = .89
        ("aaaabc", 0.89, True),
    ],
)
def test_a_threshold_compares_the_two_leading_classes(
    answers: str, threshold: float, settled: bool
) -> None:
    """The posterior counts members, whatever their weights."""
    assert met(votes(answers), "majority", threshold, width=40) is settled


def test_kin_are_one_draw_under_lineages() -> None:
    """Six replies from two first steps: 2 draws, .875 likely, by lineages; else 6 draws, .992."""
    lines = [(0, "x", STEP, 0.9), (0, "y", STEP, 0.9)]
    lines += [(parent, "a", END, 0.9) for parent in (1, 2) for _ in range(3)]
    for vote, threshold, settled in (
        ("lineages", 0.87, True),
        ("lineages", 0.88, False),
        ("weighted_majority", 0.99, True),
    ):
        assert met(tree_of(*lines), vote, threshold, width=12) is settled


def test_a_leader_by_weight_that_is_outnumbered_is_not_settled() -> None:
    """One strong a leads three weak b, which the counts do not support."""
    tree = tree_of(*ends(("a", 0.9), ("b", 0.1), ("b", 0.1), ("b", 0.1)))
    assert met(tree, "weighted_majority", 0.55, width=40) is False


@pytest.mark.parametrize("value", ["sure", 0.5, 1.0, 1, True, "0.9", float("nan")])
def test_other_values_are_refused(value: object) -> None:
    """The error says what is allowed."""
    with pytest.raises(ValidationError, match=r"must be 'certain' or a number between 0\.5 and 1"):
        SearchSpec.model_validate({"consensus": value})


@pytest.mark.parametrize(("sure", "settled"), [(0.9, True), (0.6, False)])
def test_certain_by_confidence(sure: float, settled: bool) -> None:
    """Two of ``a`` and one of ``b`` have finished; the missing one may have confidence 1, so that
    1.8 or 1.2 stands against 1.3 for ``b``."""
    tree = tree_of(
        *((0, answer, END, None) for answer in "aab"),
        logprobs=(log(sure), log(sure), log(0.3)),
    )
    for rule in ("confidence", "lowest_confidence"):
        assert met(tree, rule, "certain", width=4) is settled


def test_a_threshold_needs_a_vote_that_counts() -> None:
    """A threshold is refused for votes that choose the best reply without counting."""
    with pytest.raises(ValidationError, match="a probability goes with votes that count"):
        SearchSpec(vote="best_last", consensus=0.9)
    SearchSpec(vote="best_last", consensus="certain")
    assert SearchSpec(consensus=0.9).model_dump()["consensus"] == 0.9
    allowed = SearchSpec.model_json_schema()["properties"]["consensus"]["anyOf"]
    assert [kind.get("const") or kind["type"] for kind in allowed] == ["certain", "number", "null"]


async def run(spec: SearchSpec, ending: int, coarse: int) -> Outcome:
    """A search in which ``ending`` per cent of steps end, with answers of three kinds."""

    def say(branch: Branch) -> str:
        roll = dice(branch.tokens, branch.seed) % 10_000
        if roll % 100 < ending:
            return f"The answer is {roll // 100 % 7 // 3}."
        return f"s{roll // 100 % 9}\n\n"

    engine = ScriptedEngine(say, lambda texts: dice(tuple(texts)) % (coarse + 1) / coarse)
    return await grow(engine, spec)


async def test_the_search_says_why_it_stopped() -> None:
    """Two of three agree after the first round: the third is not continued."""

    def say(branch: Branch) -> str:
        return "s\n\n" if branch.child == 2 else "The answer is 1."

    spec = SearchSpec(policy="self_consistency", width=3, seed=1, consensus="certain")
    outcome = await grow(ScriptedEngine(say), spec)
    assert (outcome.stop_reason, outcome.answer) == (StopReason.CONSENSUS, "1")
    assert (outcome.stats.rounds, outcome.stats.finished) == (1, 2)


@pytest.mark.promise(
    "A search that stops because its answer is certain gives the answer of the whole search."
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=40)
@given(
    vote=st.sampled_from(sorted(VOTE_SCORES)),
    width=st.integers(1, 12),
    seed=st.integers(0, 2**63 - 1),
    ending=st.integers(10, 80),
    coarse=st.integers(1, 12),
    restarts=st.integers(0, 2),
)
@example(vote="best_min", width=4, seed=0, ending=15, coarse=2, restarts=0)  # mcts goes back
async def test_certain_never_changes_the_answer(
    policy: PolicyName,
    vote: VoteName,
    width: int,
    seed: int,
    ending: int,
    coarse: int,
    restarts: int,
) -> None:
    """With ``certain`` the tree is a prefix of the tree without it, and the answer is the same."""
    fields = {"policy": policy, "vote": vote, "width": width, "seed": seed, "max_depth": 6}
    spec = SearchSpec.model_validate(fields | {"restarts": restarts, "hopeless_below": 0.5})
    full = await run(spec, ending, coarse)
    early = await run(spec.model_copy(update={"consensus": "certain"}), ending, coarse)
    assert early.answer == full.answer
    ours = [(n.parent, n.tokens, n.reward) for n in early.tree.nodes]
    assert ours == [(n.parent, n.tokens, n.reward) for n in full.tree.nodes][: len(ours)]
    assert (early.stop_reason is StopReason.CONSENSUS) == (len(ours) < len(full.tree))


async def test_certain_does_stop_searches_early() -> None:
    """Under every vote some of thirty searches end early."""
    stopped = Counter[str]()
    for vote in VOTE_SCORES:
        for seed in range(30):
            spec = SearchSpec(policy="rebase", vote=vote, width=8, seed=seed, consensus="certain")
            stopped[vote] += (await run(spec, 50, 4)).stop_reason is StopReason.CONSENSUS
    assert min(stopped[vote] for vote in VOTE_SCORES) > 0, stopped
