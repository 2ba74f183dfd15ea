"""What one model knows of a search in flight: which token paths are alive, and what it has cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from runtime.embedded.batch import Advance
from runtime.embedded.draft_verification import VerifiedTokens
from search.engine import PrefixTooLong


class Account:
    """The paths and costs of one search on one model.

    A path is the int64 token ids from the prompt to the end of a step.
    ``number`` orders searches by arrival, ``passes`` counts the forward passes it had rows in,
    ``peak`` is the most unique tokens held for it at once. ``rehydrations`` counts the sequences
    that had to compute ``rehydrated_tokens`` again which an eviction had taken. ``target_passes``
    counts a sequence's passes that drew something, of ``drafted_tokens`` in them ``tested_tokens``
    were compared with the draw of the branch that they were for (the others came after a wrong
    one) and ``accepted_tokens`` equal to it.
    ``deduplicated_tokens``: decoded from a row that another branch's draw was computed by.
    ``speculated_used`` and ``speculated_wasted``: tokens drawn before a round asked for them, and
    that none asked for; ``passes_saved``: what the former shortened its rounds by.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.prompt: np.ndarray | None = None
        self.decoded_tokens = 0
        self.prefilled_tokens = 0
        self.cached_tokens = 0
        self.rehydrated_tokens = 0
        self.rehydrations = 0
        self.deduplicated_tokens = 0
        self.speculated_used = 0
        self.speculated_wasted = 0
        self.passes_saved = 0
        self.passes = 0
        self.target_passes = 0
        self.drafted_tokens = 0
        self.tested_tokens = 0
        self.accepted_tokens = 0
        self.flops = 0.0
        self.peak = 0
        self._alive: dict[bytes, set[int]] = {}
        self._path_of: dict[int, bytes] = {}
        self._dead: set[int] = set()

    def name(self, node: int, path: np.ndarray) -> None:
        """The search calls the step at ``path`` by this id. Nodes drawn alike share a path."""
        if node not in self._dead:
            self._path_of[node] = path.tobytes()
            self._alive.setdefault(path.tobytes(), set()).add(node)

    def bury(self, nodes: Iterable[int]) -> bool:
        """These nodes will not be visited again; whether a path died with its last named node."""
        changed = False
        for node in nodes:
            self._dead.add(node)
            path = self._path_of.pop(node, None)
            if path is None:
                continue
            self._alive[path].discard(node)
            if not self._alive[path]:
                del self._alive[path]
                changed = True
        return changed

    def rehydrate(self, tokens: int) -> None:
        """A sequence starts by computing so many tokens again."""
        self.rehydrated_tokens += tokens
        self.rehydrations += tokens > 0

    def take(self, taken: VerifiedTokens) -> None:
        """A branch was given its draws of a pass."""
        self.decoded_tokens += len(taken.tokens)
        self.drafted_tokens += taken.guesses.count
        self.tested_tokens += taken.tested
        self.accepted_tokens += taken.accepted

    def charge(self, other: Account) -> None:
        """Add another search's costs to this one's."""
        self.decoded_tokens += other.decoded_tokens
        self.prefilled_tokens += other.prefilled_tokens
        self.cached_tokens += other.cached_tokens
        self.rehydrated_tokens += other.rehydrated_tokens
        self.rehydrations += other.rehydrations
        self.deduplicated_tokens += other.deduplicated_tokens
        self.speculated_used += other.speculated_used
        self.speculated_wasted += other.speculated_wasted
        self.passes += other.passes
        self.target_passes += other.target_passes
        self.drafted_tokens += other.drafted_tokens
        self.tested_tokens += other.tested_tokens
        self.accepted_tokens += other.accepted_tokens
        self.flops += other.flops

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model: prefilled and decoded."""
        return self.prefilled_tokens + self.decoded_tokens - self.deduplicated_tokens

    def alive(self) -> Iterator[np.ndarray]:
        """The paths of the prompt and of every step that may be visited again."""
        if self.prompt is not None:
            yield self.prompt
        for path in self._alive:
            yield np.frombuffer(path, dtype=np.int64)


def sum_of(accounts: Iterable[Account]) -> Account:
    """The costs of several searches together."""
    total = Account(0)
    for account in accounts:
        total.charge(account)
    return total


def charge_pass(
    accounts: Mapping[str, Account],
    advances: Sequence[Advance],
    flops: Callable[[int, int, int], float],
) -> None:
    """Book a forward pass to the searches it was for; all its rows count as prefilled.

    ``flops(tokens, context_sum, logits)``: the cost of a forward.
    """
    for tree in {advance.sequence.tree for advance in advances}:
        accounts[tree].passes += 1
    for done in advances:
        account = accounts[done.sequence.tree]
        account.flops += pass_flops(done, flops)
        account.prefilled_tokens += done.rows


def pass_flops(done: Advance, flops: Callable[[int, int, int], float]) -> float:
    """What a sequence's part of a forward pass cost."""
    contexts = done.rows * done.start + done.rows * (done.rows + 1) // 2
    logits = 0 if done.logits is None else len(done.logits)
    beside = done.all_rows - done.rows
    contexts += beside * (done.start + done.rows)
    return flops(done.all_rows, contexts, logits + beside)


def must_fit(tokens: int, rooms: Mapping[str, int], what: str) -> None:
    """Raise PrefixTooLong, "``what`` NAME of ROOM", for the first room too small for ``tokens``."""
    for name, room in rooms.items():
        if tokens > room:
            raise PrefixTooLong(f"{what} {name} of {room}")
