"""No slot is lost, whatever is requested, dropped or pruned, in any order."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from runtime.embedded.choices import KvPolicy
from search.engine import Branch, Hint, Sampling, Step, Trajectory
from search.tree import Finish, node_seed
from tests.runtime.scheduler_support import PROMPTS, scheduler
from tests.runtime.test_reward_scorer import scorer

AT_ONCE = 8
LIMIT = 10
SAMPLING = Sampling(max_step_tokens=LIMIT)


@dataclass
class Growing:
    """A running search. ``leaves``: steps by node id; ``pending``: the current round's branches."""

    tree: str
    prompt: tuple[int, ...]
    remaining_rounds: int
    abort_after: int | None
    leaves: dict[int, tuple[tuple[int, ...], ...]]
    nodes: int = 0
    calls: int = 0
    pending: list[tuple[int, Branch]] = field(default_factory=list)


class RandomSearches:
    """Many random searches on one scheduler and one scorer, half of them to be aborted."""

    def __init__(self, trees: int, seed: int, kv_tokens: int, kv_policy: KvPolicy) -> None:
        self.trees = trees
        self.draw = random.Random(seed)
        self.policy, _ = scheduler(kv_tokens=kv_tokens, batch_limit=16, kv_policy=kv_policy)
        self.prm, _ = scorer(kv_tokens=kv_tokens, batch_limit=16)
        self.of_call: dict[int, Growing] = {}
        self.alive: list[Growing] = []
        self.calls = 0
        self.started = 0
        self.aborted = 0

    def run(self) -> None:
        """Run all searches to their ends, checking the accounting now and then."""
        while self.started < self.trees or self.alive:
            while self.started < self.trees and len(self.alive) < AT_ONCE:
                self.start()
            for answer in self.policy.step():
                self.score(self.of_call.pop(answer.call), answer.steps)
            for call, _ in self.prm.step():
                self.go_on(self.of_call.pop(call))
            if self.draw.random() < 0.1:
                self.policy.cache.check()
                self.prm.cache.check()
            self.abort_some()

    def start(self) -> None:
        """Start a search; every second one will be aborted."""
        self.started += 1
        prompt = self.draw.choice(list(PROMPTS.values()))
        abort_after = self.draw.randrange(12) if self.started % 2 else None
        growing = Growing(f"tree{self.started}", prompt, 4, abort_after, {0: ()})
        self.alive.append(growing)
        self.expand(growing)

    def expand(self, growing: Growing) -> None:
        """Request two or three children for every leaf."""
        growing.pending = []
        branches = []
        for leaf, steps in growing.leaves.items():
            prefix = (*growing.prompt, *(t for step in steps for t in step))
            for child in range(self.draw.randrange(2, 4)):
                seed = node_seed(self.started, growing.tree, (leaf, child))
                growing.nodes += 1
                branches.append(Branch(leaf, child, prefix, seed, LIMIT, growing.nodes))
                growing.pending.append((growing.nodes, branches[-1]))
        self.policy.expand(self.number(growing), growing.tree, branches, SAMPLING)

    def score(self, growing: Growing, steps: list[Step]) -> None:
        """Request scores of the steps drawn."""
        trajectories = []
        for (node, branch), step in zip(growing.pending, steps, strict=True):
            path = (*growing.leaves[branch.parent], step.tokens)
            trajectories.append(Trajectory(node, path, ("",) * len(path)))
        growing.leaves = {
            t.node: t.steps
            for t, s in zip(trajectories, steps, strict=True)
            if s.finish is not Finish.END
        }
        self.prm.score(self.number(growing), growing.tree, growing.prompt, "", trajectories)

    def go_on(self, growing: Growing) -> None:
        """Keep at most three leaves and expand them, or end the search."""
        growing.remaining_rounds -= 1
        if not growing.remaining_rounds or not growing.leaves:
            self.end(growing)
            return
        survivors = self.draw.sample(sorted(growing.leaves), k=min(3, len(growing.leaves)))
        dead = tuple(node for node in growing.leaves if node not in survivors)
        growing.leaves = {node: growing.leaves[node] for node in survivors}
        values = {node: self.draw.random() for node in survivors}
        self.policy.hint(growing.tree, Hint(values, tuple(survivors), dead))
        self.prm.hint(growing.tree, Hint(dead=dead))
        self.expand(growing)

    def abort_some(self) -> None:
        """Count down every ``abort_after`` and abort searches that pass 0."""
        for growing in list(self.alive):
            if growing.abort_after is None:
                continue
            growing.abort_after -= 1
            if growing.abort_after < 0:
                stopped = self.policy.abort(growing.tree) + self.prm.abort(growing.tree)
                self.aborted += len(stopped)
                for call in stopped:
                    del self.of_call[call]
                self.end(growing)

    def end(self, growing: Growing) -> None:
        """Release a search."""
        self.alive.remove(growing)
        self.policy.release(growing.tree)
        self.prm.release(growing.tree)

    def number(self, growing: Growing) -> int:
        """The id of a new call of this search."""
        self.calls += 1
        self.of_call[self.calls] = growing
        return self.calls


SLOW = [(200, p, t) for p in ("lru", "arborkv") for t in (6000, 150)]


@pytest.mark.parametrize(
    ("trees", "kv_policy", "kv_tokens"),
    [(50, "arborkv", 150), *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)],
)
def test_many_trees_half_of_them_aborted_leave_only_prompts(
    trees: int, kv_policy: KvPolicy, kv_tokens: int
) -> None:
    """With ample and little KV: nothing runs or is held, prompts are cached, no slot is lost."""
    searches = RandomSearches(trees, kv_tokens, kv_tokens, kv_policy)
    searches.run()
    assert searches.aborted > trees // 4
    for cache in (searches.policy.cache, searches.prm.cache):
        cache.check()
        assert not cache.sequences
        assert cache.active_tokens == 0
        assert not any(node.steps for node in cache.radix.nodes())
        prompt_prefixes = {p[:n] for p in PROMPTS.values() for n in range(1, len(p) + 1)}
        assert 0 < cache.cached_tokens <= len(prompt_prefixes)
        assert cache.pool.available + cache.cached_tokens == kv_tokens
        assert (cache.evicted_tokens > 0) == (kv_tokens == 150)
    assert (searches.policy.running, searches.policy.waiting) == (0, 0)
    assert not searches.policy.searches
    assert not searches.of_call
