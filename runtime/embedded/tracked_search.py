"""What one model knows of a search in flight: which token paths are alive, and what it has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from runtime.accounting import LivePaths, sum_of_contexts
from runtime.embedded.batch import Advance
from runtime.embedded.deduplication import VerifiedTokens
from search.counters import Counters, combined


class TrackedSearch:
    """The live paths and the costs of one search on one model.

    A path is the int64 token ids from the prompt to the end of a step. ``number`` orders searches
    by arrival; ``passes_saved``: by how many forward passes beam extension shortened its rounds.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt: np.ndarray | None = None
        self.counters = Counters()
        self.passes_saved = 0
        self._alive = LivePaths[bytes]()
        self._dead: set[int] = set()

    def name(self, node: int, path: np.ndarray) -> None:
        """The search calls the step at ``path`` by this id. Nodes with equal steps share a path."""
        if node not in self._dead:
            self._alive.add(node, path.tobytes())

    def mark_dead(self, nodes: Sequence[int]) -> bool:
        """These nodes will not be visited again; whether a path died with its last named node."""
        self._dead.update(nodes)
        return bool(self._alive.mark_dead(nodes))

    def count_rehydrated(self, tokens: int) -> None:
        """A sequence starts by computing so many tokens again."""
        self.counters.rehydrated_tokens += tokens
        self.counters.rehydrations += tokens > 0

    def count_verified(self, verified: VerifiedTokens) -> None:
        """A branch was given its tokens of a pass."""
        self.counters.decoded_tokens += len(verified.tokens)
        self.counters.drafted_tokens += verified.draft.count
        self.counters.tested_tokens += verified.tested
        self.counters.accepted_tokens += verified.accepted

    def alive(self) -> Iterator[np.ndarray]:
        """The paths of the prompt and of every step that may be visited again."""
        if self.prompt is not None:
            yield self.prompt
        for path in self._alive:
            yield np.frombuffer(path, dtype=np.int64)


def total_of(past: Counters, searches: Mapping[str, TrackedSearch]) -> Counters:
    """What past searches and these have cost together."""
    return combined(Counters, (past, *(search.counters for search in searches.values())))


def charge_pass(
    searches: Mapping[str, TrackedSearch],
    advances: Sequence[Advance],
    flops: Callable[[int, int, int], float],
) -> None:
    """Charge a forward pass to the searches that had rows in it.

    ``flops(tokens, context_sum, logits)``: the cost of a forward.
    """
    for tree in {advance.sequence.tree for advance in advances}:
        searches[tree].counters.model_calls += 1
    for done in advances:
        searches[done.sequence.tree].counters.flops += pass_flops(done, flops)


def pass_flops(done: Advance, flops: Callable[[int, int, int], float]) -> float:
    """What a sequence's part of a forward pass cost."""
    contexts = sum_of_contexts(done.start, done.rows)
    logits = 0 if done.logits is None else len(done.logits)
    children = done.all_rows - done.rows
    contexts += children * (done.start + done.rows)
    return flops(done.all_rows, contexts, logits + children)
