"""What a recorded search shows in hindsight: which blocks it left came back onto its path.

A search is followed as the engine's KV policy follows it, event by event, so that a signal has the
value here that it has there when an order is made. Each transition gives a row for every block off
Path* that something may grow from: those are the ones whose own score counts (section 4 of the
paper, as ``kvpolicy.tree_blocks`` weighs it).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from kvpolicy.eviction_order import EvictionParams, Ints
from kvpolicy.fit import ReentryRows
from kvpolicy.tree_blocks import TreeBlocks
from kvpolicy.value import UNFITTED, Floats


class ReentryRecorder:
    """One search from its start to its end."""

    def __init__(self, prompt_tokens: int) -> None:
        """The search stands at its prompt, which is block 0."""
        self._blocks = TreeBlocks(prompt_tokens, UNFITTED.table(), EvictionParams())
        self._left: list[tuple[Ints, Floats]] = []
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
        """A block closed, unless it has died before. ``attention``: what its end pays to each block
        of its path, the prompt first, as ``attention_shares``; empty where it was not read."""
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
        """The search moved on; see ``TreeBlocks.transition``."""
        blocks = self._blocks
        blocks.transition(values, active, dead, outlook)
        path, left = blocks.path_and_candidates()
        self._last_on_path |= dict.fromkeys(path.tolist(), len(self._left))
        self._left.append((left, blocks.signals(left)))

    def rows(self) -> ReentryRows:
        """What ``kvpolicy.fit`` is given: a block came back if it is on Path* at a later
        transition, and would have cost its tokens. The search is over."""
        tokens = self._blocks.tokens
        signals, reentered, cost = [np.empty((3, 0))], [np.empty(0)], [np.empty(0)]
        for number, (left, before) in enumerate(self._left):
            last = [self._last_on_path.get(node, -1) for node in left.tolist()]
            signals.append(before)
            reentered.append((np.array(last, dtype=np.int64) > number).astype(np.float64))
            cost.append(tokens[left].astype(np.float64))
        v, u, a = np.concatenate(signals, axis=1)
        return ReentryRows(v, u, a, np.concatenate(reentered), np.concatenate(cost))
