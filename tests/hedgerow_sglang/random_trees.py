"""Run in SGLang's environment: our cache on random trees against kvpolicy's exact mode.

``python -m tests.hedgerow_sglang.random_trees SEEDS`` prints one JSON document; an assertion that
fails ends it. No server and no model: SGLang's own radix cache and the notes are real.
"""

from __future__ import annotations

import json
import random
import sys
import time
from array import array
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (  # pyright: ignore[reportMissingImports]
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import (  # pyright: ignore[reportMissingImports]
    CacheInitParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # pyright: ignore[reportMissingImports]

from hedgerow_sglang.plugin_protocol import Note, custom_params
from hedgerow_sglang.radix_paths import depth, nodes_at_and_below
from hedgerow_sglang.search_cache import SearchCache
from hedgerow_sglang.search_registry import CacheNamespace
from kvpolicy.eviction_order import Infeasible
from tests.kvpolicy.pressure import kept_tokens

HERE = CacheNamespace()


class Slots:
    """A slot allocator that only counts. With ``size`` 0, eviction frees only what is requested."""

    device = "cpu"
    size = 0

    def __init__(self) -> None:
        self.freed = 0

    def free_segment(self, slots: torch.Tensor, start_pos: int) -> None:
        """Count freed slots; SGLang's interface since 0.5.21."""
        self.freed += len(slots)

    def free(self, slots: torch.Tensor) -> None:
        """Count freed slots; SGLang's interface before 0.5.21."""
        self.freed += len(slots)


def empty_cache(page: int = 1) -> SearchCache:
    """A search cache with no model behind it."""
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=Slots(),
        page_size=page,
    )
    return SearchCache(params)


def cached_tokens(cache: SearchCache, path: array) -> int:
    """The number of a path's tokens that are cached."""
    return matched_tokens(cache.match_prefix(MatchPrefixParams(key=RadixKey(path))))


def matched_tokens(match: Any) -> int:
    """The length of a match in tokens, for any SGLang version's result type."""
    indices = getattr(match, "device_indices", None)
    return match.device_prefix_len if indices is None else len(indices)


def read_since(last: Any, start: float) -> bool:
    """Whether every node of the path that ends at ``last`` was accessed at ``start`` or later."""
    ages, node = [], last
    while node is not None:
        ages.append(node.last_access_time)
        node = node.parent
    return min(ages) >= start


@dataclass
class CachedTrees:
    """Random trees, cached whole. ``paths``: each block's token path, by tree and node. Siblings
    begin with different tokens, so no two blocks share any."""

    cache: SearchCache
    chance: random.Random
    paths: dict[tuple[str, int], array] = field(default_factory=dict)
    parents: dict[tuple[str, int], int] = field(default_factory=dict)

    def grow(self, tree: str, first: int, blocks: int, page: int) -> None:
        """Grow a tree, each block under a random parent; the prompt repeats the token ``first``."""
        prompt = array("q", [first] * (page * self.chance.randint(1, 5)))
        self.paths[tree, 0] = prompt
        for node in range(1, blocks):
            parent = self.chance.randrange(node)
            step = [100 + node] * (page * self.chance.randint(1, 9))
            self.draw(tree, node, parent, array("q", step), turn=0)

    def draw(self, tree: str, node: int, parent: int, step: array, turn: int) -> None:
        """Draw a step: send its note, insert its tokens into SGLang's tree, complete its block."""
        note = Note(tree, len(self.paths[tree, 0]), node, parent, turn)
        self.cache.take_note(note)
        above, path = self.paths[tree, parent], self.paths[tree, parent] + step
        request = SimpleNamespace(last_node=self.read(note, above))
        with self.cache._from(self.cache._prefix_end(request)):
            start = time.monotonic()
            insertion = InsertParams(key=RadixKey(path), value=torch.arange(len(path)))
            assert read_since(self.cache.insert(insertion).last_device_node, start)
            self.cache.complete_step(note, path, HERE)
        self.paths[tree, node], self.parents[tree, node] = path, parent

    def read(self, note: Note, path: array) -> Any:
        """Read a path with a note and check that the match equals a walk from the root, even if the
        path is not that of the step named in the note. Returns the last node."""
        params = SimpleNamespace(custom_params=custom_params(note))
        request: Any = SimpleNamespace(sampling_params=params)
        for tokens in (self.chance.choice(list(self.paths.values())), path):
            key, start = RadixKey(tokens), time.monotonic()
            match = self.cache.match_prefix(MatchPrefixParams(key=key, req=request))
            last = match.last_device_node
            assert read_since(last, start)
            plain = self.cache.match_prefix(MatchPrefixParams(key=key))
            assert last is plain.last_device_node
            assert matched_tokens(match) == matched_tokens(plain) == depth(last)
        return last

    def below(self, tree: str, top: int) -> set[int]:
        """A node and all its descendants."""
        subtree = {top}
        for (name, node), parent in self.parents.items():
            if name == tree and parent in subtree:
                subtree.add(node)
        return subtree

    def hint(self, tree: str, turn: int, **fields: object) -> None:
        """Send a hint: a note of the search's turn with these fields."""
        self.cache.take_note(Note(tree, len(self.paths[tree, 0]), turn=turn, **fields))  # type: ignore[arg-type]

    def cached(self, tree: str, node: int) -> int:
        """The number of cached tokens on a block's path."""
        return cached_tokens(self.cache, self.paths[tree, node])

    def kept_tokens(self, tree: str, node: int) -> int:
        """The number of a block's own tokens that are cached."""
        above = 0 if node == 0 else len(self.paths[tree, self.parents[tree, node]])
        return max(0, self.cached(tree, node) - above)


def random_trees(seed: int, page: int = 1) -> CachedTrees:
    """One to three random trees. Most blocks have rewards, some of them equal; each tree has one or
    two active blocks."""
    chance = random.Random(seed)
    trees = CachedTrees(empty_cache(page), chance)
    for number in range(chance.randint(1, 3)):
        tree, blocks = f"tree{number}", chance.randint(2, 20)
        trees.grow(tree, number + 1, blocks, page)
        values = {n: chance.randint(0, 8) / 8 for n in range(1, blocks) if chance.random() < 0.8}
        active = tuple(chance.sample(range(blocks), min(blocks, chance.randint(1, 2))))
        trees.hint(tree, 1, values=values, active=active)
    return trees


def on_active_paths(trees: CachedTrees) -> int:
    """The number of tokens on active paths, which kvpolicy keeps under any budget."""
    try:
        kept_tokens(trees.cache.searches.block_table, 0)
    except Infeasible as error:
        return error.needed
    return 0


def same_decisions(seed: int) -> int:
    """Evict down to up to four budgets: each time the cache keeps what kvpolicy would keep."""
    trees = random_trees(seed)
    cache, least = trees.cache, on_active_paths(trees)
    budgets = range(least, cache.total_size() + 1)
    budgets = sorted(trees.chance.sample(budgets, min(4, len(budgets))), reverse=True)
    for budget in budgets:
        cache.evict(EvictParams(num_tokens=cache.total_size() - budget))
        expected = kept_tokens(cache.searches.block_table, budget)
        for tree, node in trees.paths:
            assert trees.kept_tokens(tree, node) == expected[tree][node], (seed, budget, tree, node)
        assert cache.evictable_size() == cache.total_size() == budget, (seed, budget)
    return len(budgets)


def pages_go_whole(seed: int) -> int:
    """With pages of four tokens, eviction frees whole pages, up to three tokens too many."""
    trees = random_trees(seed, page=4)
    cache = trees.cache
    target = trees.chance.randint(1, cache.total_size())
    freed = cache.evict(EvictParams(num_tokens=target)).num_tokens_evicted
    assert target <= freed < target + 4, (seed, target, freed)
    for tree, node in trees.paths:
        above = max(trees.parents.get((tree, node), 0), 0)
        assert trees.cached(tree, node) % 4 == 0
        whole = trees.cached(tree, above) == len(trees.paths[tree, above])
        assert whole or node == 0 or not trees.kept_tokens(tree, node), (seed, tree, node)
    return freed


def a_pruned_subtree_goes_at_once(seed: int) -> int:
    """Pruning frees a subtree without any eviction and leaves everything else cached."""
    trees = random_trees(seed)
    tree, top = trees.chance.choice([at for at in trees.paths if at[1] > 0])
    dead = trees.below(tree, top)
    before = trees.cache.total_size()
    trees.hint(tree, 2, dead=tuple(sorted(dead)))
    for name, node in trees.paths:
        gone = name == tree and node in dead
        above = 0 if node == 0 else len(trees.paths[name, trees.parents[name, node]])
        whole = len(trees.paths[name, node]) - above
        assert trees.kept_tokens(name, node) == (0 if gone else whole), (seed, name, node)
    assert trees.cache.freed_tokens == before - trees.cache.total_size() > 0
    return trees.cache.freed_tokens


def what_is_held_is_kept_up(seed: int) -> int:
    """After random draws, reads, hints, locks and evictions, each node is held by exactly the
    blocks whose own tokens it has, and each evictable leaf is queued with a turn."""
    trees = random_trees(seed, page=1 if seed % 3 else 4)
    cache, chance, locked, looks = trees.cache, trees.chance, [], 0
    for turn in range(2, 30):
        tree, node = chance.choice(list(trees.paths))
        act = chance.randrange(6)
        if act == 0:
            cache.evict(EvictParams(num_tokens=chance.randint(1, 20)))
        elif act == 1:
            path = trees.paths[tree, node]
            cache.insert(InsertParams(key=RadixKey(path), value=torch.arange(len(path))))
        elif act == 2:
            step = array("q", [100 + chance.randint(1, 30)] * (4 * chance.randint(1, 3)))
            trees.draw(tree, 100 + turn, node, step[: chance.choice((4, 12))], turn)
            cache.evict(EvictParams(num_tokens=chance.randint(0, 6)))
            trees.draw(tree, 100 + turn, node, step, turn)
        elif act == 3:
            values = {n: chance.random() for t, n in trees.paths if t == tree and n}
            trees.hint(tree, turn, values=values, active=(node,))
        elif act == 4:
            trees.hint(tree, turn, dead=tuple(sorted(trees.below(tree, node))) if node else ())
        elif locked and chance.random() < 0.6:
            cache.dec_lock_ref(locked.pop())
        else:
            match = cache.match_prefix(MatchPrefixParams(key=RadixKey(trees.paths[tree, node])))
            cache.inc_lock_ref(match.last_device_node)
            locked.append(match.last_device_node)
        looks += as_if_looked_at_anew(cache, seed)
    return looks


def as_if_looked_at_anew(cache: SearchCache, seed: int) -> int:
    """Check each node's holders against the blocks' paths, and every evictable leaf's turn."""
    blocks = [b for tree in cache.searches.block_table for b in cache.searches.blocks(tree)]
    paths = {block: cache.searches.path(block) for block in blocks}
    stack, nodes = [(cache.root_node, array("q"))], 0
    while stack:
        node, above = stack.pop()
        tokens = above + array("q", node.key.token_ids)
        stack += [(child, tokens) for child in node.children.values()]
        if node is cache.root_node:
            continue
        nodes += 1
        holders = {
            block
            for block, (_, path, start) in paths.items()
            if path[: len(tokens)] == tokens
            and start // cache.page_size * cache.page_size <= len(above)
        }
        assert set(cache._held.holders(node)) == holders, (seed, node.id)
    for leaf in cache.evictable_leaves:
        keys = [key for key, _, of in cache._evict_heap if of is leaf]
        assert any(key <= cache._evict_key(leaf) for key in keys), (seed, leaf.id)
    return nodes


def the_queue_is_in_sglangs_order(seed: int) -> int:
    """Requests at random nodes, with ties, are ordered as by SGLang's own cache. Older versions do
    not ask the cache for the order."""
    trees = random_trees(seed)
    nodes = list(nodes_at_and_below(trees.cache.root_node))
    waiting = [trees.chance.choice(nodes) for _ in range(trees.chance.randint(0, 40))]
    if (order := getattr(super(SearchCache, trees.cache), "dfs_weight_order", None)) is not None:
        assert trees.cache.dfs_weight_order(waiting) == order(waiting), (seed, waiting)
    return len(waiting)


def what_another_search_holds_stays() -> int:
    """Two searches share a prompt and a step; tokens held by either stay until both are over."""
    trees = CachedTrees(empty_cache(), random.Random(0))
    for tree in ("ash", "oak"):
        trees.paths[tree, 0] = array("q", [9] * 3)
        trees.draw(tree, 1, 0, array("q", [1] * 5), turn=0)
        step = [2] * 4 if tree == "ash" else [1, 1, 3, 3]
        trees.draw(tree, 2, 1, array("q", step), turn=0)
    total = 3 + 5 + 4 + 4
    assert trees.cache.total_size() == total
    assert trees.cache.state()["held_tokens"] == total
    trees.hint("oak", 1, dead=(1, 2))
    assert [trees.kept_tokens("ash", node) for node in (0, 1, 2)] == [3, 5, 4]
    assert trees.cache.total_size() == total - 4
    trees.cache.take_note(Note("oak", 3, over=("ash",)))
    assert trees.cache.total_size() == 3
    assert trees.cache.state()["held_tokens"] == 3
    trees.cache.take_note(Note("oak", 3, over=("oak",)))
    assert trees.cache.total_size() == 3
    assert trees.cache.state()["held_tokens"] == 0
    return total


def what_is_read_now_stays() -> int:
    """A path that a running request has locked is neither dropped nor evicted."""
    trees = CachedTrees(empty_cache(), random.Random(0))
    trees.paths["ash", 0] = array("q", [9] * 3)
    trees.draw("ash", 1, 0, array("q", [1] * 5), turn=0)
    key = RadixKey(trees.paths["ash", 1])
    last = trees.cache.match_prefix(MatchPrefixParams(key=key)).last_device_node
    trees.cache.inc_lock_ref(last)
    trees.hint("ash", 1, dead=(1,))
    assert trees.cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 0
    assert trees.kept_tokens("ash", 1) == 5
    trees.cache.dec_lock_ref(last)
    assert trees.cache.evict(EvictParams(num_tokens=100)).num_tokens_evicted == 8
    return 8


def what_nobody_holds_goes_by_age() -> int:
    """Tokens held by no search are evicted oldest first; a cut entry's remainder keeps its age."""
    cache = empty_cache()
    old, young = (RadixKey(array("q", [token] * 4)) for token in (2, 1))
    for key in (old, young):
        cache.insert(InsertParams(key=key, value=torch.arange(4)))
    for remaining in (6, 4):
        cache.evict(EvictParams(num_tokens=2))
        assert cache.total_size() == remaining
    assert cached_tokens(cache, young.token_ids) == 4
    return 4


def what_has_gone_is_not_read() -> int:
    """A step shorter than a page ends in its parent's last node; once that is evicted, nothing is
    found of the step."""
    trees = CachedTrees(empty_cache(4), random.Random(0))
    trees.paths["ash", 0] = array("q", [9] * 4)
    trees.draw("ash", 1, 0, array("q", [1] * 4), turn=0)
    trees.draw("ash", 2, 1, array("q", [2] * 2), turn=0)
    child = Note("ash", 4, 3, 2, 1)
    assert depth(trees.read(child, trees.paths["ash", 2])) == 8
    freed = trees.cache.evict(EvictParams(num_tokens=8)).num_tokens_evicted
    assert depth(trees.read(child, trees.paths["ash", 2])) == 0
    return freed


def main(seeds: int) -> None:
    """Run every check for ``seeds`` seeds and print the counts as JSON."""
    counts = {
        "compared": sum(same_decisions(seed) for seed in range(seeds)),
        "paged": sum(pages_go_whole(seed) for seed in range(seeds)),
        "kept_up": sum(what_is_held_is_kept_up(seed) for seed in range(seeds)),
        "dropped": sum(a_pruned_subtree_goes_at_once(seed) for seed in range(seeds)),
        "queued": sum(the_queue_is_in_sglangs_order(seed) for seed in range(seeds)),
        "shared": what_another_search_holds_stays(),
        "locked": what_is_read_now_stays(),
        "aged": what_nobody_holds_goes_by_age(),
        "gone": what_has_gone_is_not_read(),
    }
    print(json.dumps(counts))


if __name__ == "__main__":
    main(int(sys.argv[1]))
