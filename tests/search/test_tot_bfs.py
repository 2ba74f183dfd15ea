"""ToT-BFS: worked examples of SEED's algorithm 2, and the bounds of its width."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from search.engine import Branch
from search.events import Event, Expanded, Finished, Selected
from search.policies.policy import Round
from search.policies.tot_bfs import TotBfs
from search.spec import SearchSpec, StopReason
from search.tree import ROOT
from tests.search.scripted_engine import ScriptedEngine, dice, grow
from tests.search.trees import END, STEP, row, tree_of


def test_the_papers_setting() -> None:
    """Three thoughts, the one with the highest value goes on (SEED, appendix D, GSM8K)."""
    policy = TotBfs(width=3, branch=3, breadth=1)
    assert policy.plan(tree_of()) == Round({ROOT: 3})
    assert policy.plan(row(0.4, 0.9, 0.1)) == Round({2: 3}, (1, 3))


def test_breadth_two_by_hand() -> None:
    """Of six thoughts the two best are kept, three thoughts each; equal values: the lower id."""
    policy = TotBfs(width=6, branch=3, breadth=2)
    assert policy.plan(tree_of()) == Round({ROOT: 3})
    assert policy.plan(row(0.2, 0.7, 0.7)) == Round({2: 3, 3: 3}, (1,))
    level = [(1, "a", STEP, 0.5), (1, "b", STEP, 0.8), (2, "c", STEP, 0.8), (2, "d", STEP, 0.8)]
    tree = tree_of((0, "x", STEP, 0.9), (0, "y", STEP, 0.9), *level)
    assert policy.plan(tree) == Round({4: 3, 5: 3}, (3, 6))


def test_finished_trajectories_leave_the_rest_of_the_width() -> None:
    """Of width 5 one has finished: four thoughts are left, three for the best and one more."""
    ends = (0, "x", END, 0.95)
    steps = [(0, "a", STEP, 0.3), (0, "b", STEP, 0.6), (0, "c", STEP, 0.5)]
    assert TotBfs(5, 3, 3).plan(tree_of(ends, *steps)) == Round({3: 3, 4: 1}, (2,))


def test_the_root_gets_no_more_than_may_finish() -> None:
    """At width 2 with branches of 3 the root gets two thoughts."""
    assert TotBfs(2, 3, 1).plan(tree_of()) == Round({ROOT: 2})


def test_breadth_defaults_to_what_the_width_has_room_for() -> None:
    """Breadth is the number of whole branches that fit the width, at least one."""
    policies = [TotBfs.from_spec(SearchSpec(policy="tot_bfs", width=w)) for w in (1, 3, 16)]
    assert [(policy.branch, policy.breadth) for policy in policies] == [(3, 1), (3, 1), (3, 5)]
    spec = SearchSpec(policy="tot_bfs", width=16, branch=5, breadth=2)
    assert TotBfs.from_spec(spec) == TotBfs(16, 5, 2)


@settings(max_examples=40)
@given(
    width=st.integers(1, 24),
    branch=st.integers(1, 6),
    breadth=st.one_of(st.none(), st.integers(1, 9)),
    seed=st.integers(0, 2**63 - 1),
    ends=st.integers(0, 60),
    coarse=st.integers(1, 20),
)
async def test_levels_keep_their_breadth_and_never_outgrow_the_width(
    width: int, branch: int, breadth: int | None, seed: int, ends: int, coarse: int
) -> None:
    """A level keeps at most ``breadth`` leaves with ``branch`` thoughts each, the last maybe fewer;
    no more finish than the width; kept leaves have rewards no lower than pruned ones."""

    def say(request: Branch) -> str:
        roll = dice(request.tokens, request.seed) % 100
        return "The answer is 1." if roll < ends else f"s{roll % 7}\n\n"

    engine = ScriptedEngine(say, lambda texts: dice(tuple(texts)) % coarse / coarse)
    events: list[Event] = []
    fields = {"policy": "tot_bfs", "width": width, "branch": branch, "breadth": breadth}
    spec = SearchSpec.model_validate(fields | {"seed": seed, "max_depth": 6})
    outcome = await grow(engine, spec, listen=events.append)
    tree, most_kept = outcome.tree, breadth or max(1, width // branch)
    shares_by_round: dict[int, list[int]] = {}
    finished, expanded = Counter[int](), Counter[int]()
    for event in events:
        if isinstance(event, Selected):
            shares_by_round.setdefault(event.round, []).append(event.children)
        elif isinstance(event, Expanded):
            expanded[event.round] += 1
        elif isinstance(event, Finished):
            finished[event.round] += 1
    remaining = width
    for number, shares in sorted(shares_by_round.items()):
        assert len(shares) <= most_kept
        assert sorted(shares)[1:] == [branch] * (len(shares) - 1)
        assert expanded[number] == sum(shares) <= min(remaining, most_kept * branch)
        remaining -= finished[number]
    assert len(tree.finished()) == width - remaining <= width
    for depth in {node.depth for node in tree.nodes if node.children}:
        level = [node for node in tree.nodes if node.depth == depth and node.finish is STEP]
        parent_rewards = [node.reward or 0.0 for node in level if node.children]
        others = [node.reward or 0.0 for node in level if not node.children]
        assert min(parent_rewards) >= max(others, default=0.0)
    assert outcome.stop_reason in (StopReason.ANSWERED, StopReason.WIDTH_SPENT, StopReason.DEPTH)
