"""Shares the KV bytes of both models anew when the searches under way ask for it.

What a round is like says more than what was expected of searches before the first one came: how
many branches, how long, how much of them alike, how far a step goes. The roofline is asked again
(FlashTTS, section 4.3.1) when one of the stores lacks what its batch would take; slots then go from
one store to the other between two passes. Trees do not depend on it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from kvpolicy.roofline import SplitLoad, TooLittleMemory
from runtime.embedded.drawing.batch import Batch
from runtime.embedded.kv.split import Shared
from search.engine import Branch, Step

WEIGHT = 0.5
"""Of a round's mean step against those before it."""
SLACK = 0.1
"""Of what a store is to have, what it may lack, and of what it has, the least that it is given:
to move slots costs a copy."""

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Round:
    """The branches of one: how many, their tokens, and those of their tree, each counted once."""

    branches: int
    tokens: int
    distinct: int

    @classmethod
    def of(cls, branches: Sequence[Branch]) -> Round:
        """What a round asks for."""
        tokens = sum(len(branch.tokens) for branch in branches)
        return cls(len(branches), tokens, _distinct({branch.tokens for branch in branches}))


@dataclass(frozen=True, slots=True)
class Growth:
    """What a branch comes to, on average: ``step``, its new tokens; ``own``, those of them that no
    other one drew alike, each counted once; ``lanes``, the sequences, those alike being one."""

    step: float
    own: float
    lanes: float

    @classmethod
    def of(cls, branches: Sequence[Branch], steps: Sequence[Step]) -> Growth:
        """Of a round that has been drawn: ``steps`` in the order of ``branches``, at least one."""
        ways: dict[tuple[int, ...], set[tuple[int, ...]]] = {}
        for branch, step in zip(branches, steps, strict=True):
            ways.setdefault(branch.tokens, set()).add(step.tokens)
        return cls(
            step=sum(len(step.tokens) for step in steps) / len(steps),
            own=sum(map(_distinct, ways.values())) / len(steps),
            lanes=sum(map(len, ways.values())) / len(steps),
        )

    def towards(self, latest: Growth) -> Growth:
        """As expected once ``latest`` is known."""
        return Growth(
            step=self.step + WEIGHT * (latest.step - self.step),
            own=self.own + WEIGHT * (latest.own - self.own),
            lanes=self.lanes + WEIGHT * (latest.lanes - self.lanes),
        )


def load_of(rounds: Sequence[Round], growth: Growth) -> SplitLoad | None:
    """What all rounds under way ask for together, if they grow so; None for none.

    The verifier reads each sequence with its new step, and the generator draws it in as much room.
    """
    branches = sum(one.branches for one in rounds)
    if not branches:
        return None
    new = max(1, round(growth.step))
    length = new + round(sum(one.tokens for one in rounds) / branches)
    held = sum(one.distinct for one in rounds) + branches * growth.own
    sequences = max(round(branches * growth.lanes), math.ceil(held / length))
    own = min(length, math.ceil(held / sequences))
    return SplitLoad(sequences, length, new, own, own_grown=own)


class Resplit:
    """Both models' stores, of which one gives slots to the other; ``moves``: how often so far."""

    def __init__(self, shared: Shared, policy: Batch, prm: Batch, step: float) -> None:
        """``step``: the tokens of a step until there are some, all of them each branch's own."""
        self.moves = 0
        self._shared = shared
        self.stores = policy, prm
        self._rounds: dict[str, Round] = {}
        self._asked: dict[str, Sequence[Branch]] = {}
        self._growth = Growth(step, own=step, lanes=1.0)
        self._known = False
        self._new = False
        for batch, least in zip(self.stores, shared.least, strict=True):
            batch.cache.least = least

    def asked(self, tree: str, branches: Sequence[Branch]) -> None:
        """A search asks for a round."""
        self._rounds[tree] = Round.of(branches)
        self._asked[tree] = branches
        self._new = True

    def drew(self, tree: str, steps: Sequence[Step]) -> None:
        """A search's round has been drawn: its steps, in order, unless it ended before all were."""
        branches = self._asked.pop(tree, ())
        if branches and len(branches) == len(steps):
            latest = Growth.of(branches, steps)
            self._growth = self._growth.towards(latest) if self._known else latest
            self._known = True

    def ended(self, tree: str) -> None:
        """A search is over."""
        self._rounds.pop(tree, None)
        self._asked.pop(tree, None)

    def settle(self) -> None:
        """Move slots if a store lacks some for the rounds under way."""
        load = load_of(list(self._rounds.values()), self._growth) if self._new else None
        self._new = False
        if load is None:
            return
        try:
            split = self._shared.plan(load)
        except TooLittleMemory as error:
            log.info("KV stays as it is shared: %s", error)
            return
        needs = split.generator_batch * load.grown, split.verifier_batch * load.stored
        planned = self._shared.tokens(split)
        if any(map(_worth_moving, self.stores, needs, planned)):
            self._move(*planned)

    def _move(self, kv_tokens: int, prm_kv_tokens: int) -> None:
        """First one gives, then the other gets what has come free of what it was to get."""
        policy, prm = self.stores
        if kv_tokens > policy.cache.capacity:
            prm.resize(prm_kv_tokens)
            left = self._shared.budget - prm.cache.capacity * self._shared.prm.kv_bytes
            policy.resize(left // self._shared.policy.kv_bytes)
        else:
            policy.resize(kv_tokens)
            left = self._shared.budget - policy.cache.capacity * self._shared.policy.kv_bytes
            prm.resize(left // self._shared.prm.kv_bytes)
        self.moves += 1
        log.debug(
            "KV split anew: policy %d tokens, PRM %d", *(s.cache.capacity for s in self.stores)
        )


def _worth_moving(batch: Batch, need: int, planned: int) -> bool:
    """Whether a store lacks what its batch takes and would get a good part of it."""
    have = batch.cache.capacity
    return have < (1 - SLACK) * need and planned > (1 + SLACK) * have


def _distinct(ways: Iterable[tuple[int, ...]]) -> int:
    """Tokens of different sequences, of which what they begin alike counts once."""
    found, before = 0, ()
    for way in sorted(ways):
        found += len(way) - _alike(before, way)
        before = way
    return found


def _alike(left: tuple[int, ...], right: tuple[int, ...]) -> int:
    """How many leading tokens two have in common, by halves."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
