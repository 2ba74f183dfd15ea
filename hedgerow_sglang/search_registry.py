"""The token paths that searches in flight hold and what these are worth, by the searches' notes.

Pure: notes and token ids in, ranks and dead paths out. The order is that of
``kvpolicy.block_table``, as in the embedded engine. Only the radix cache knows what is cached.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from hedgerow_sglang.held_nodes import Block
from hedgerow_sglang.plugin_protocol import Note
from kvpolicy.block_table import BlockTable, EvictionKey
from kvpolicy.eviction_order import SERVING_PARAMS
from kvpolicy.value import UNFITTED, Theta

ROOT = 0
SILENT_TURNS = 4096
"""A search that sends no note during so many hints of all searches is taken to be gone."""

Tokens = array


class CacheNamespace(NamedTuple):
    """What keeps equal tokens of different users apart in SGLang's cache."""

    extra_key: str | None = None
    cache_salt: str | None = None


class HeldPath(NamedTuple):
    """The path of a block that its search may return to.

    ``tokens``: int64 ids from the prompt's start to the block's end, of which the first ``above``
    are those of the block above.
    """

    namespace: CacheNamespace
    tokens: Tokens
    above: int


class DeadPath(NamedTuple):
    """A block's path that no search returns to; ``keep``: tokens of its prompt, which may stay
    cached. ``silent``: its search only sent no notes for long, so the whole path may stay."""

    block: Block
    namespace: CacheNamespace
    tokens: Tokens
    keep: int
    silent: bool = False


@dataclass(slots=True)
class _Search:
    """One search; by node: its blocks' paths, parents, and the turns in which they were drawn."""

    prompt: int
    turn: int = 0
    last_turn: int = 0
    namespace: CacheNamespace = field(default_factory=CacheNamespace)
    paths: dict[int, Tokens] = field(default_factory=dict)
    parents: dict[int, int] = field(default_factory=dict)
    block_turns: dict[int, int] = field(default_factory=dict)


class SearchRegistry:
    """The searches in flight on one server."""

    def __init__(self, theta: Theta = UNFITTED) -> None:
        self.block_table = BlockTable(theta, SERVING_PARAMS)
        self._searches: dict[str, _Search] = {}
        self._turns = 0

    def __len__(self) -> int:
        return len(self._searches)

    def take_note(self, note: Note) -> list[DeadPath]:
        """Take a note; returns the paths that are dead by it. A hint whose turn is not above that
        of the last one taken is ignored."""
        dead_paths = [path for tree in note.over for path in self._end_search(tree)]
        if note.tree in note.over:
            return dead_paths
        search = self._searches.get(note.tree)
        if search is None:
            self.block_table.add_tree(note.tree, note.prompt)
            self.block_table[note.tree].transition({}, [ROOT], ())
            search = self._searches[note.tree] = _Search(note.prompt)
        if note.hints and note.turn > search.turn:
            self._turns += 1
            search.turn = note.turn
            blocks = self.block_table[note.tree]
            blocks.transition(note.values, note.active, note.dead, note.outlook)
            dead_paths += self._remove(note.tree, search, note.dead)
            dead_paths += self._forget_silent()
        search.last_turn = self._turns
        return dead_paths

    def read_before(self, note: Note, prefix: Tokens) -> int:
        """How many tokens of a request's prefix its search had read before this turn.

        They are those of the parent's path, or of the longest block's path for a request about no
        step. The last token of a drawn step does not count: it was drawn but never read.
        """
        search = self._searches.get(note.tree)
        if search is None:
            return 0
        nodes = search.paths if note.parent is None else {note.parent} & search.paths.keys()
        paths = [search.paths[node] for node in nodes if search.block_turns[node] < note.turn]
        return max((len(path) - 1 for path in paths if prefix[: len(path)] == path), default=0)

    def complete_step(self, note: Note, tokens: Tokens, namespace: CacheNamespace) -> list[Block]:
        """Record that a request's step is complete; ``tokens``: from the prompt to its end.

        Returns the blocks that are new or longer now: a step may be drawn in several requests. A
        node or a search that has died meanwhile adds none.
        """
        search = self._searches.get(note.tree)
        if search is None or note.node is None or note.parent is None:
            return []
        search.namespace = namespace
        new: list[Block] = []
        if ROOT not in search.paths:
            search.prompt = min(search.prompt, len(tokens))
            self._add(search, ROOT, -1, tokens[: search.prompt], note.turn)
            new.append((note.tree, ROOT))
        above = note.parent
        path = search.paths.get(above)
        if path is None or tokens[: len(path)] != path:
            above = ROOT
        blocks = self.block_table[note.tree]
        own_tokens = max(1, len(tokens) - len(search.paths[above]))
        blocks.add_block(note.node, above, own_tokens)
        head = search.paths.get(note.node, tokens[:0])
        if blocks.alive(note.node) and len(head) < len(tokens) and tokens[: len(head)] == head:
            self._add(search, note.node, above, tokens, note.turn)
            new.append((note.tree, note.node))
        return new

    def blocks(self, tree: str) -> list[Block]:
        """The blocks that a search may return to, parents first."""
        search = self._searches.get(tree)
        return [] if search is None else [(tree, node) for node in search.paths]

    def chain(self, block: Block) -> list[Block]:
        """A block and its ancestors, the nearest first."""
        tree, node = block
        search, chain = self._searches.get(tree), []
        while search is not None and node in search.paths:
            chain.append((tree, node))
            node = search.parents[node]
        return chain

    def path(self, block: Block) -> HeldPath:
        """A block's namespace and its tokens from the prompt on."""
        tree, node = block
        search = self._searches[tree]
        above = search.paths.get(search.parents[node])
        tokens = search.paths[node]
        return HeldPath(search.namespace, tokens, 0 if above is None else len(above))

    def rank(self, block: Block, readers: Mapping[Block, int] | None = None) -> EvictionKey:
        """A block's key in the eviction order; the lowest goes first.

        ``readers``: what ``readers`` returns; of the blocks that the round reads, those that a
        waiting request reads sooner stay longer. A step drawn in the current round has no reward
        yet: it is kept like one that the round reads.
        """
        tree, node = block
        search = self._searches[tree]
        on_path, weight, later, lower = self.block_table.eviction_key(tree, node)
        if search.block_turns[node] >= search.turn > 0:
            on_path, weight = True, 0.0
        if on_path and readers:
            weight = -float(readers.get(block, math.inf))
        return on_path, weight, later, lower

    def readers(self, notes: Sequence[Note]) -> dict[Block, int]:
        """For each block that a waiting request reads, the place of the first request that does;
        ``notes``: of the requests that have not begun, the next one first."""
        readers: dict[Block, int] = {}
        for place, note in enumerate(notes):
            search, node = self._searches.get(note.tree), note.parent
            while search is not None and node in search.paths and (note.tree, node) not in readers:
                readers[note.tree, node] = place
                node = search.parents[node]
        return readers

    def clear(self) -> None:
        """Forget all paths, since nothing is cached any more; the searches stay."""
        for search in self._searches.values():
            search.paths.clear()
            search.parents.clear()
            search.block_turns.clear()

    @staticmethod
    def _add(search: _Search, node: int, above: int, tokens: Tokens, turn: int) -> None:
        search.paths[node] = tokens
        search.parents[node] = above
        search.block_turns[node] = turn

    def _remove(self, tree: str, search: _Search, nodes: Iterable[int]) -> list[DeadPath]:
        dead_paths = []
        for node in nodes:
            tokens = search.paths.pop(node, None)
            if tokens is not None:
                del search.parents[node], search.block_turns[node]
                dead = DeadPath((tree, node), search.namespace, tokens, search.prompt)
                dead_paths.append(dead)
        return dead_paths

    def _end_search(self, tree: str) -> list[DeadPath]:
        search = self._searches.pop(tree, None)
        self.block_table.remove_tree(tree)
        return [] if search is None else self._remove(tree, search, list(search.paths))

    def _forget_silent(self) -> list[DeadPath]:
        """End the searches that have sent no note for long; returns their paths."""
        silent = [
            tree
            for tree, search in self._searches.items()
            if self._turns - search.last_turn > SILENT_TURNS
        ]
        dead = [path for tree in silent for path in self._end_search(tree)]
        return [path._replace(silent=True) for path in dead]
