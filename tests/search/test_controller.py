"""The search loop: what it requests from the engine, and what it does with the replies."""

from __future__ import annotations

import asyncio
import threading

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search.controller import search
from search.engine import Branch, Sampling, Step
from search.outcome import Outcome
from search.policies.best_of_n import BestOfN
from search.policies.policy import Round, Scores
from search.policies.registry import POLICIES
from search.problem import Problem
from search.spec import PolicyName, SearchSpec, StopReason
from search.tree import Finish, Node, NodeState, Tree, node_seed
from search.tree_builder import TreeBuilder
from tests.search.scripted_engine import ScriptedEngine, answer_of, decode, dice, encode

PROBLEM = Problem(encode("Q: "), "the question")


async def run(engine: ScriptedEngine, **dials: object) -> Outcome:
    """Run a search of ``PROBLEM`` with a clock that stands still."""
    spec = SearchSpec.model_validate({"seed": 7, **dials})
    return await search(PROBLEM, spec, engine, tree_id="t", answer_of=answer_of, clock=lambda: 0.0)


def reply(branch: Branch) -> str:
    """The text of a branch's prefix, without the prompt."""
    return decode(branch.tokens[len(PROBLEM.prompt) :])


def script(replies: dict[str, list[str]]) -> ScriptedEngine:
    """An engine that draws ``replies[prefix's text][child index]``."""
    return ScriptedEngine(say=lambda branch: replies[reply(branch)][branch.child])


async def test_a_search_worked_by_hand() -> None:
    """REBASE at width 3: a gets no child, b and c go on, and the answer with more weight wins.

    Rewards .1, .9, .9 at T = .2 share 3 as 0, 2, 1. b's children end, c's one child too.
    """
    engine = script(
        {
            "": ["a\n\n", "b\n\n", "c\n\n"],
            "b\n\n": ["The answer is 1.", "The answer is 2."],
            "c\n\n": ["The answer is 2."],
        }
    )
    rewards = {"a\n\n": 0.1, "b\n\n": 0.9, "c\n\n": 0.9}
    engine.score_of = lambda texts: rewards.get(texts[-1], 0.8 if "1" in texts[-1] else 0.5)
    outcome = await run(engine, width=3)
    states = [(n.parent, n.state.value, n.reward) for n in outcome.tree.nodes[1:]]
    assert states == [
        (0, "pruned", 0.1),
        (0, "open", 0.9),
        (0, "open", 0.9),
        (2, "finished", 0.8),
        (2, "finished", 0.5),
        (3, "finished", 0.5),
    ]
    assert (outcome.answer, outcome.chosen, outcome.text) == ("2", 5, "b\n\nThe answer is 2.")
    assert [(c.answer, c.weight, c.count) for c in outcome.answers] == [
        ("2", 1.0, 2),
        ("1", 0.8, 1),
    ]
    assert outcome.stop_reason is StopReason.ANSWERED
    assert engine.released == ["t"]
    assert engine.live == set()


@pytest.mark.promise(
    "A child starts from its parent's token ids, with a seed that follows from the request's seed "
    "and its path."
)
async def test_branches_carry_prefix_seed_and_order() -> None:
    """A child's seed follows from the request seed and its path.

    Parents come in id order, although node 2 is better and gets more children.
    """
    engine = script({"": ["a\n\n", "b\n\n", "c\n\n"], "a\n\n": ["x"], "b\n\n": ["z", "w"]})
    engine.score_of = lambda texts: {"a\n\n": 0.7, "b\n\n": 0.9}.get(texts[0], 0.0)
    await run(engine, policy="beam", width=3)
    first, second = engine.expanded
    assert [(b.parent, b.child, b.tokens) for b in first] == [
        (0, i, PROBLEM.prompt) for i in range(3)
    ]
    assert [b.seed for b in first] == [node_seed(7, "step", (i,)) for i in range(3)]
    expected = [(1, 0, "a\n\n"), (2, 0, "b\n\n"), (2, 1, "b\n\n")]
    assert [(b.parent, b.child, reply(b)) for b in second] == expected
    assert [b.seed for b in second] == [node_seed(7, "step", p) for p in ((0, 0), (1, 0), (1, 1))]


async def test_trajectories_carry_a_seed_for_a_judge() -> None:
    """The seed follows from the request seed and the path, and is not that of the step."""
    engine = script({"": ["a\n\n", "b\n\n"], "a\n\n": ["x"], "b\n\n": ["z"]})
    engine.score_of = lambda texts: 0.5
    await run(engine, policy="beam", width=2)
    first, second = engine.scored
    assert [t.seed for t in first] == [node_seed(7, "judge", (i,)) for i in range(2)]
    assert [t.seed for t in second] == [node_seed(7, "judge", (i, 0)) for i in range(2)]


async def test_a_trajectory_that_is_cut_is_scored_like_one_that_ended() -> None:
    """Best of N has the rewards of all finished replies, cut ones included, and of no other."""
    engine = ScriptedEngine(
        say=lambda b: "The answer is 1." if b.child else f"s{len(b.tokens)}\n\n"
    )
    outcome = await run(engine, policy="best_of_n", width=2, max_depth=2)
    scored = [node.id for node in outcome.tree.nodes if node.reward is not None]
    assert scored == [node.id for node in outcome.tree.finished()] == [2, 3]


def test_a_node_that_grows_again_goes_on_counting() -> None:
    """Later children of a node have indices, and so seeds, that no earlier one had."""
    tree = Tree(PROBLEM.prompt)
    spec = SearchSpec(seed=7)
    builder = TreeBuilder(tree, spec, BestOfN(4), "\n\n", 100, Scores.NONE, lambda _: None)
    for first in (0, 2):
        branches = builder.branches(Round({0: 2}))
        assert [b.child for b in branches] == [first, first + 1]
        assert [b.seed for b in branches] == [node_seed(7, "step", (first + i,)) for i in (0, 1)]
        step = Step((1,), "s", Finish.STEP, 0.0, 0.0)
        builder.commit(builder.pending(branches, [step, step]), {})


@pytest.mark.promise(
    "A search reports a node dead in the next round once nothing can grow there, but never one "
    "that it may return to."
)
@pytest.mark.parametrize(("again", "dead"), [(False, (1, 3)), (True, (3,))])
def test_dead_is_what_nobody_may_come_back_to(again: bool, dead: tuple[int, ...]) -> None:
    """The only child of 1, 3, has ended: 3 is dead in any search, 1 unless it may grow again."""

    class Returning(BestOfN):
        def frontier(self, tree: Tree) -> list[Node]:
            return [node for node in tree.nodes if node.state is NodeState.OPEN]

        def stopped(self, tree: Tree) -> None:
            return None

    tree, policy = Tree(PROBLEM.prompt), (Returning if again else BestOfN)(4)
    spec = SearchSpec(seed=7)
    builder = TreeBuilder(tree, spec, policy, "\n\n", 100, Scores.NONE, lambda _: None)
    for plan, finish in ((Round({0: 2}), Finish.STEP), (Round({1: 1}), Finish.END)):
        assert builder.select(plan).dead == ()
        branches = builder.branches(plan)
        steps = [Step((b.node,), "s", finish, 0.0, 0.0) for b in branches]
        builder.commit(builder.pending(branches, steps), {})
    assert builder.select(Round({2: 1})).dead == dead


async def test_past_the_end() -> None:
    """With ``ignore_eos`` trajectories reach the greatest depth, whatever is drawn."""
    engine = ScriptedEngine(say=lambda b: "The answer is 1.")
    outcome = await run(engine, policy="best_of_n", width=2, max_depth=3, ignore_eos=True)
    finished = outcome.tree.finished()
    assert [(node.depth, node.finish) for node in finished] == [(3, Finish.LIMIT)] * 2


async def test_sampling_follows_the_spec() -> None:
    """Steps end at the delimiter, or after ``step_tokens`` if it is set."""
    engine = ScriptedEngine()
    await run(engine, width=1, temperature=0.5, top_p=0.9, max_step_tokens=100)
    assert engine.samplings[0] == Sampling(0.5, 0.9, ("\n\n",), 100, prompt_tokens=3)
    engine = ScriptedEngine()
    await run(engine, width=1, step_tokens=4)
    assert engine.samplings[0] == Sampling(1.0, 1.0, (), 4, prompt_tokens=3)


@pytest.mark.promise(
    "A search sees a round's results whole and in id order, so the order of arrival changes no "
    "tree."
)
@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=10)
@given(seed=st.integers(0, 2**63 - 1), order=st.integers(0, 2**32))
async def test_same_seed_same_tree_whatever_the_order(
    policy: PolicyName, seed: int, order: int
) -> None:
    """The engine may draw branches in any order: digest, answers and KV are the same."""
    shuffled = ScriptedEngine(finish_order=lambda n: sorted(range(n), key=lambda i: dice(order, i)))
    plain = await run(ScriptedEngine(), policy=policy, width=9, seed=seed)
    reordered = await run(shuffled, policy=policy, width=9, seed=seed)
    assert plain.digest == reordered.digest
    assert plain.answers == reordered.answers
    assert plain.stats.kv_tokens_total == reordered.stats.kv_tokens_total


async def test_another_seed_another_tree() -> None:
    """Seeds 1 and 2 give different trees."""
    assert (await run(ScriptedEngine(), seed=1)).digest != (
        await run(ScriptedEngine(), seed=2)
    ).digest


@pytest.mark.promise("The tree rounds rewards to 1e-4 when they enter it.")
async def test_noise_on_rewards_changes_nothing() -> None:
    """Rewards are rounded to 1e-4 on entering the tree, so that noise of 1e-7 changes nothing."""
    noisy = ScriptedEngine(score_of=lambda texts: 0.5 + 1e-7 * (dice(tuple(texts)) % 3 - 1))
    quiet = ScriptedEngine(score_of=lambda _: 0.5)
    assert (await run(noisy)).digest == (await run(quiet)).digest
    assert {n.reward for n in (await run(noisy)).tree.nodes[1:]} <= {0.5, None}


@pytest.mark.promise("A search scores each distinct token prefix once.")
async def test_equal_paths_are_scored_once() -> None:
    """Of eight children only two differ: two paths are scored, all eight have rewards."""
    lines = ["a\n\n", "b\n\n", "a\n\n", "a\n\n", "b\n\n", "a\n\n", "b\n\n", "a\n\n"]
    engine = ScriptedEngine(say=lambda b: "end" if reply(b) else lines[b.child])
    outcome = await run(engine, policy="beam", width=8, beam_width=8)
    assert [[t.texts for t in call] for call in engine.scored] == [
        [("a\n\n",), ("b\n\n",)],
        [("a\n\n", "end"), ("b\n\n", "end")],
    ]
    assert [t.node for t in engine.scored[0]] == [1, 2]
    rewards = [node.reward for node in outcome.tree.nodes[1:9]]
    assert rewards[0] is not None
    assert [r == rewards[0] for r in rewards] == [line == "a\n\n" for line in lines]


@pytest.mark.parametrize(
    ("dials", "expected"),
    [
        ({"policy": "self_consistency"}, []),
        ({"policy": "best_of_n"}, [("s\n\n", "end")]),
        ({"policy": "self_consistency", "vote": "best_last"}, [("s\n\n", "end")]),
        ({"policy": "best_of_n", "vote": "best_min"}, [("s\n\n",), ("s\n\n", "end")]),
        ({"policy": "beam"}, [("s\n\n",), ("s\n\n", "end")]),
    ],
)
async def test_only_what_policy_or_vote_needs_is_scored(
    dials: dict[str, object], expected: list[tuple[str, ...]]
) -> None:
    """No unused reward is computed; a vote over steps has every step scored."""
    engine = ScriptedEngine(say=lambda b: "end" if reply(b) else "s\n\n")
    await run(engine, width=2, **dials)
    assert [t.texts for call in engine.scored for t in call] == expected


async def test_an_empty_step_is_pruned_and_its_width_returns() -> None:
    """Of three children one is only a delimiter: it is pruned unscored; the next round has 3."""
    engine = script({"": ["\n\n", "a\n\n", "b\n\n"], "a\n\n": ["x", "x"], "b\n\n": ["y", "y"]})
    outcome = await run(engine, policy="best_of_n", width=3)
    born = outcome.tree[1]
    assert (born.finish, born.state, born.reward) == (Finish.EMPTY, NodeState.PRUNED, None)
    assert [(b.parent, b.child) for b in engine.expanded[1]] == [(2, 0), (2, 1), (3, 0)]


async def test_a_step_that_repeats_its_parent_is_pruned() -> None:
    """A loop is cut at its first repetition; a sibling with another step goes on."""
    engine = script({"": ["a\n\n", "b\n\n"], "a\n\n": ["a\n\n"], "b\n\n": ["x"]})
    outcome = await run(engine, policy="best_of_n", width=2)
    loop = outcome.tree[3]
    assert (loop.parent, loop.finish, loop.state) == (1, Finish.LOOP, NodeState.PRUNED)
    assert outcome.stop_reason is StopReason.WIDTH_SPENT


async def test_a_step_cut_by_length_goes_on() -> None:
    """After LENGTH the next step continues the text, and pieces may repeat."""
    engine = ScriptedEngine(say=lambda b: "aaaaaa" if len(b.tokens) < 9 else "z")
    outcome = await run(engine, policy="best_of_n", width=1, max_step_tokens=3)
    assert [n.finish for n in outcome.tree.nodes[1:]] == [Finish.LENGTH, Finish.LENGTH, Finish.END]
    assert outcome.text == "aaaaaaz"
    assert outcome.stop_reason is StopReason.ANSWERED


async def test_a_hint_says_where_the_search_would_turn_if_it_knows() -> None:
    """Best-first and MCTS hints begin with the active nodes; beam search's have no outlook."""
    for policy, knows in (("best_first", True), ("mcts", True), ("beam", False)):
        engine = ScriptedEngine()
        await run(engine, policy=policy, width=9)
        assert any(hint.outlook for hint in engine.hints) == knows
        for hint in engine.hints:
            assert not knows or set(hint.active) == set(hint.outlook[: len(hint.active)])


async def test_hints_name_values_the_active_and_the_dead() -> None:
    """Each round's hint has new rewards, the nodes that grow now and those that never will again.

    Beam prunes 1 and draws 4 and 5 below 2, 6 below 3; 4 and 5 end, and so 2 is dead too.
    """
    engine = script(
        {
            "": ["a\n\n", "b\n\n", "c\n\n"],
            "b\n\n": ["end", "end"],
            "c\n\n": ["d\n\n"],
            "c\n\nd\n\n": ["end"],
        }
    )
    rewards = {"a\n\n": 0.1, "b\n\n": 0.5, "c\n\n": 0.5}
    engine.score_of = lambda texts: rewards.get(texts[-1], 0.7)
    await run(engine, policy="beam", width=3, beam_width=2)
    hints = [(dict(h.values), h.active, h.dead) for h in engine.hints]
    assert hints == [
        ({}, (0,), ()),
        ({1: 0.1, 2: 0.5, 3: 0.5}, (2, 3), (1,)),
        ({4: 0.7, 5: 0.7, 6: 0.7}, (6,), (2, 4, 5)),  # 5 repeats 4: one score
    ]


async def test_a_seed_must_be_given() -> None:
    """A search without a seed is refused."""
    with pytest.raises(ValueError, match="seed: None"):
        await run(ScriptedEngine(), seed=None)


def test_a_delimiter_must_be_given() -> None:
    """An empty delimiter is refused."""
    with pytest.raises(ValueError, match="delimiter: empty"):
        Problem((1,), "q", "")


@pytest.mark.parametrize("consensus", [None, "certain"])
async def test_comparing_answers_does_not_hold_up_the_loop(consensus: str | None) -> None:
    """A comparison runs in a thread, so that it can wait for the event loop."""
    turned = threading.Event()
    turns: list[bool] = []

    def same(first: str, second: str) -> bool:
        asyncio.run_coroutine_threadsafe(turn(), loop)
        turns.append(turned.wait(60))
        return first == second

    async def turn() -> None:
        turned.set()

    loop = asyncio.get_running_loop()
    outcome = await search(
        PROBLEM,
        SearchSpec.model_validate({"seed": 7, "width": 9, "consensus": consensus}),
        ScriptedEngine(),
        tree_id="t",
        answer_of=answer_of,
        same_answer=same,
        clock=lambda: 0.0,
    )
    assert len(outcome.answers) > 1
    assert all(turns)
    assert turns


@pytest.mark.parametrize("policy", ["beam", "mcts"])
async def test_what_is_said_of_a_child_ahead_is_what_the_round_asks(policy: PolicyName) -> None:
    """A branch's ``ahead`` gives its children's seeds and limits; at the last depth it is None."""
    engine = ScriptedEngine()
    outcome = await run(engine, policy=policy, width=9, max_depth=4, trajectory_tokens=60)
    branches = {branch.node: branch for call in engine.expanded for branch in call}
    children = [b for b in branches.values() if b.parent in branches and b.parent < b.node]
    assert children
    for branch in children:
        above = branches[branch.parent].ahead
        assert above is not None
        assert above.child_seed(branch.child) == branch.seed
        length = len(outcome.tree[branch.parent].tokens)
        assert branch.limit == min(256, above.room - length)
    for branch in branches.values():
        node = outcome.tree[branch.node]
        assert (branch.ahead is None) == (node.depth == 4)


@pytest.mark.parametrize(
    ("spec", "steps"),
    [
        ({"policy": "self_consistency"}, 3),
        ({"policy": "best_of_n"}, 3),
        ({"policy": "best_of_n", "vote": "best_min"}, 0),
        ({"policy": "rebase"}, 0),
        ({"policy": "self_consistency", "deadline_ms": 60_000}, 0),
        ({"policy": "self_consistency", "max_tokens": 99}, 0),
        ({"policy": "self_consistency", "max_kv_tokens": 999}, 0),
        ({"policy": "self_consistency", "consensus": "certain"}, 0),
    ],
)
async def test_an_engine_hears_which_steps_will_follow(spec: dict[str, object], steps: int) -> None:
    """``ahead.steps`` goes to the greatest depth if no reward decides and nothing ends a search."""
    branches: list[Branch] = []

    def say(branch: Branch) -> str:
        branches.append(branch)
        return "The answer is 2."

    await run(ScriptedEngine(say=say), width=2, max_depth=4, **spec)
    assert {branch.ahead and branch.ahead.steps for branch in branches} == {steps}
