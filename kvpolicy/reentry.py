"""Record a search to learn which blocks off its path came back onto it later.

The recorder takes the same events as the engine's KV policy, so its signals have the values that
they have in the engine when blocks are ordered. Each transition gives a row for every block off
Path* that something may grow from: the blocks whose own score counts (section 4 of the paper, as
``kvpolicy.tree_blocks`` weighs it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvpolicy.eviction_order import EvictionParams, Ints
from kvpolicy.fit import ReentryRows
from kvpolicy.tree_blocks import TreeBlocks
from kvpolicy.value import UNFITTED, Floats


class ReentryRecorder:
    """Records one search from its start to its end."""

    def __init__(self, prompt_tokens: int) -> None:
        """Start at the prompt, which is block 0."""
        self._blocks = TreeBlocks(prompt_tokens, UNFITTED.table(), EvictionParams())
        self._off_path: list[tuple[Ints, Floats]] = []
        """At each transition: blocks off Path* and their v, u and a (3, n)."""
        self._last_on_path: dict[int, int] = {}

    def boundary(
        self,
        node: int,
        parent: int,
        tokens: int,
        confidence: float | None = None,
        attention: Sequence[float] = (),
    ) -> None:
        """Add a block that closed, unless it is dead. ``attention``: what its last token pays to
        each block of its path, from the prompt on, as ``attention_shares``; empty if not read."""
        blocks = self._blocks
        blocks.add_block(node, parent, tokens, confidence)
        chain = blocks.chain(node) if attention and node in blocks else ()
        for block, share in zip(chain, attention, strict=False):
            blocks.add_attention(block, share, 1)

    def transition(
        self,
        values: Mapping[int, float],
        active: Iterable[int],
        dead: Iterable[int],
        outlook: Sequence[int] = (),
    ) -> None:
        """Take a move of the search; arguments as for ``TreeBlocks.transition``."""
        blocks = self._blocks
        blocks.transition(values, active, dead, outlook)
        path, off_path = blocks.path_and_candidates()
        self._last_on_path |= dict.fromkeys(path.tolist(), len(self._off_path))
        self._off_path.append((off_path, blocks.signals(off_path)))

    def rows(self) -> ReentryRows:
        """The rows for ``kvpolicy.fit``, once the search is over. A block came back if it is on
        Path* at a later transition; its weight is its tokens."""
        tokens = self._blocks.tokens
        signals, reentered, cost = [np.empty((3, 0))], [np.empty(0)], [np.empty(0)]
        for number, (off_path, values) in enumerate(self._off_path):
            last = [self._last_on_path.get(node, -1) for node in off_path.tolist()]
            signals.append(values)
            reentered.append((np.array(last, dtype=np.int64) > number).astype(np.float64))
            cost.append(tokens[off_path].astype(np.float64))
        v, u, a = np.concatenate(signals, axis=1)
        return ReentryRows(v, u, a, np.concatenate(reentered), np.concatenate(cost))
