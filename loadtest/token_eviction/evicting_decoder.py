"""Draws a tree's steps from paths of which only some tokens are held, a wave of branches at a time.

A wave: the policy hears where it stands (transition), what its paths miss is computed if it ever
is, and then all of its branches decode side by side. Noise is the other engines', so with room for
everything the steps are too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

import numpy as np

from kvpolicy.eviction_order import Infeasible, Ints
from kvpolicy.value import confidence
from loadtest.token_eviction.path_sequence import CachedPath, PathSequence
from loadtest.token_eviction.sparse_forward import SparseInput, SparseOutput
from loadtest.token_eviction.token_cache import GIVEN_UP, CachedBlock, TokenCache
from loadtest.token_eviction.token_eviction_cost import TokenEvictionCost
from loadtest.token_eviction.token_eviction_options import TokenEvictionOptions
from loadtest.token_eviction.token_eviction_policies import TokenEvictionPolicy, policy_for
from runtime.embedded.sampler import sample
from runtime.stop_strings import StopStrings, StopStringTables
from runtime.text import Text
from search.engine import Branch, EngineError, Hint, KvFull, PrefixTooLong, Sampling, Step
from search.tree import ROOT, Finish

PLACES = 64
"""Branches of a wave at most."""
TOP = 64
"""Equation (1): tokens whose terms of the entropy are counted one by one."""


class SparseForwards(Protocol):
    """What the decoder needs of a model; ``SparseForward`` is one."""

    def new_store(self, slots: int) -> Any:
        """Room for the keys and values of ``slots`` tokens."""
        ...

    def run(self, readings: Sequence[SparseInput], store: Any) -> SparseOutput:
        """Compute all rows, write their keys and values."""
        ...

    def flops(self, tokens: int, context_sum: int, logits: int) -> float:
        """Of a pass; arguments as of ``ModelConfig.flops``."""
        ...


class EvictingDecoder:
    """One tree on its way through a model. Not thread-safe."""

    def __init__(
        self,
        forward: SparseForwards,
        text: Text,
        options: TokenEvictionOptions,
        prompt: Sequence[int],
        *,
        clock: Callable[[], float] = time.perf_counter,
        watch: Callable[[TokenEvictionCost, int, int], None] = lambda *_: None,
    ) -> None:
        """``watch`` hears after every pass: costs so far, tokens read or written, tokens held.

        Raises PrefixTooLong for a prompt over the budget.
        """
        if len(prompt) > options.kv_tokens:
            room = f"kv_tokens {options.kv_tokens}"
            raise PrefixTooLong(f"a prompt of {len(prompt)} tokens does not fit {room}")
        self.spent = TokenEvictionCost()
        self.held = TokenCache(options.kv_tokens, np.array(prompt, dtype=np.int64))
        self.policy: TokenEvictionPolicy = policy_for(
            options.kv_policy, self.held, share=options.share, floors=options.floors
        )
        self.sequences: list[PathSequence] = []
        self._forward, self._text, self._clock, self._watch = forward, text, clock, watch
        self._store = forward.new_store(options.kv_tokens)
        self._stops = StopStringTables(text.pieces)
        self._reading_now = 0
        self._read_prompt()

    def expand(
        self,
        branches: Sequence[Branch],
        sampling: Sampling,
        must_go_on: Callable[[], None] = lambda: None,
    ) -> list[Step]:
        """Draw one step for each branch, in the order asked.

        ``must_go_on`` is called before every pass and may raise. Raises PrefixTooLong for a path
        that does not fit the budget with its step, whose last token may stand beyond it, and
        EngineError for an unknown parent.
        """
        for branch in branches:
            if len(branch.tokens) + branch.limit - 1 > self.held.pool.capacity:
                raise PrefixTooLong(
                    f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
                    f"do not fit kv_tokens {self.held.pool.capacity}"
                )
            if self.held.block_of(branch.parent) is None:
                raise EngineError(f"parent: node {branch.parent} has no KV here")
        steps: list[Step] = []
        try:
            while len(steps) < len(branches):
                wave = self._wave(branches[len(steps) :])
                steps += self._draw(wave, sampling, must_go_on)
        except Infeasible as error:
            raise KvFull(str(error)) from error
        finally:
            self._land()
        return steps

    def hint(self, hint: Hint) -> None:
        """The search moved on: what is dead goes at once."""
        with self._deciding():
            dead = self.held.mark_dead(hint.dead)
            blocks = {node: self.held.block_of(node) for node in (*hint.values, *hint.outlook)}
            values = {b: hint.values[n] for n in hint.values if (b := blocks[n]) is not None}
            outlook = [b for n in hint.outlook if (b := blocks[n]) is not None]
            self.policy.transition(values, list(dict.fromkeys(outlook)), dead)

    def check(self) -> None:
        """Prove that every slot is free or one token's."""
        self.held.check([sequence.slots for sequence in self.sequences])

    def _wave(self, branches: Sequence[Branch]) -> Sequence[Branch]:
        """As many of the first branches as fit, floors of other blocks included; one at least.

        The last token of a single one may stand beyond the budget: its own is not held then.
        """
        paths: set[int] = set()
        needed = 0
        for count, branch in enumerate(branches[:PLACES]):
            chain = self.held.chain(self._block(branch))
            needed += branch.limit
            needed += sum(len(self.held[b].tokens) for b in chain if b not in paths)
            paths.update(chain)
            if count and needed + self.policy.reserved(paths) > self.held.pool.capacity:
                return branches[:count]
        return branches[:PLACES]

    def _draw(
        self, wave: Sequence[Branch], sampling: Sampling, must_go_on: Callable[[], None]
    ) -> list[Step]:
        """The wave's steps, all of its branches in every pass until each has ended."""
        must_go_on()
        paths = self._arrive(sorted({self._block(branch) for branch in wave}))
        sequences = [PathSequence.start(branch, paths[self._block(branch)]) for branch in wave]
        self.sequences = list(sequences)
        while self.sequences:
            self._choose([f for f in self.sequences if f.finish is None], sampling)
            for sequence in [f for f in self.sequences if self._goes_nowhere(f)]:
                self._end(sequence)
            if self.sequences:
                must_go_on()
                self._feed(self.sequences)
            for sequence in [f for f in self.sequences if f.finish is not None]:
                self._close(sequence)
        return [self._step(sequence) for sequence in sequences]

    def _arrive(self, leaves: Sequence[int]) -> dict[int, CachedPath]:
        """Transition: the paths down to these blocks, whole if what is missing is ever computed
        again. All of that, and what comes next after each, in one pass."""
        held, rehydrates = self.held, self.policy.rehydrates
        with self._deciding():
            self.policy.enter(leaves)
        rows = self._rows(leaves)
        lacking = {
            leaf: [(block, which[block.slots[which] == GIVEN_UP]) for block, which in mine]
            for leaf, mine in rows.items()
        }
        again = [sum(len(which) for _, which in mine) for mine in lacking.values()]
        self._make_room(sum(again), beside=0 if rehydrates else sum(again))
        for mine in lacking.values():
            for block, which in mine:
                held.restore(block, which)
        before = self._clock()
        self._reading_now = sum(held[b].held for b in {b for x in leaves for b in held.chain(x)})
        read = self._run([self._reading(held.chain(leaf), rows[leaf]) for leaf in leaves])
        computed = sum(len(which) for mine in rows.values() for _, which in mine)
        self.spent.prefilled_tokens += computed
        if rehydrates:
            self.spent.rehydrations += sum(count > 0 for count in again)
            self.spent.rehydrated_tokens += sum(again)
            self.spent.again_seconds += (self._clock() - before) * sum(again) / computed
        paths = zip(leaves, read.logits, strict=True)
        return {leaf: CachedPath.to(leaf, held, logits) for leaf, logits in paths}

    def _rows(self, leaves: Sequence[int]) -> dict[int, list[tuple[CachedBlock, Ints]]]:
        """What each path computes: its last token, without which nothing can be drawn, and what is
        missing if that ever comes back, where no path before it does so already."""
        rows: dict[int, list[tuple[CachedBlock, Ints]]] = {}
        claimed: set[int] = set()
        for leaf in leaves:
            chain = self.held.chain(leaf)
            mine = rows[leaf] = []
            for name in chain:
                block = self.held[name]
                comes_back = self.policy.rehydrates and name not in claimed
                which = block.missing if comes_back else np.empty(0, dtype=np.int64)
                if name == leaf:
                    which = np.union1d(which, [len(block.tokens) - 1])
                if len(which):
                    mine.append((block, which))
            claimed.update(chain)
        return rows

    def _read_prompt(self) -> None:
        root = self.held[ROOT]
        every = np.arange(len(root.tokens))
        self.held.restore(root, every)
        read = self._run([self._reading([ROOT], [(root, every)])])
        root.within += read.masses[0]
        self.spent.prefilled_tokens += len(every)

    def _reading(
        self, chain: Sequence[int], rows: Sequence[tuple[CachedBlock, Ints]]
    ) -> SparseInput:
        """Rows of some blocks of a path, which may read all that is held of it."""
        tokens = np.concatenate([block.tokens[which] for block, which in rows])
        positions = np.concatenate([block.start + which for block, which in rows])
        writes = np.concatenate([block.slots[which] for block, which in rows])
        return SparseInput(tokens, positions, writes, *self.held.slots(chain))

    def _choose(self, sequences: Sequence[PathSequence], sampling: Sampling) -> None:
        """Draw each one's next token."""
        if not sequences:
            return
        drawn = sample(
            np.stack([sequence.logits for sequence in sequences]),
            np.array([sequence.branch.seed for sequence in sequences], dtype=np.uint64),
            [sequence.length for sequence in sequences],
            sampling.temperature,
            sampling.top_p,
        )
        stops = self._stops.of(sampling.stop)
        for sequence, token, logprob, entropy in zip(sequences, *drawn, strict=True):
            sequence.take(int(token), float(logprob), float(entropy))
            sequence.finish = self._finish(sequence, stops)
        self.spent.decoded_tokens += len(sequences)

    def _finish(self, sequence: PathSequence, stops: StopStrings) -> Finish | None:
        if sequence.tokens[-1] in self._text.eos:
            return Finish.END
        if stops.ended(sequence.tokens):
            return Finish.STEP
        return Finish.LENGTH if len(sequence.tokens) == sequence.branch.limit else None

    def _feed(self, sequences: Sequence[PathSequence]) -> None:
        """Pressure if need be, then one row each: the token just drawn."""
        self._make_room(len(sequences), beside=len(sequences))
        for sequence in sequences:
            sequence.slots.append(int(self.held.pool.allocate(1)[0]))
        read = self._run([sequence.reading() for sequence in sequences])
        for sequence, logits, mass in zip(sequences, read.logits, read.masses, strict=True):
            sequence.hear(logits, mass)

    def _make_room(self, slots: int, beside: int) -> None:
        """``slots`` free ones, ``beside`` of them for more than active paths are to hold."""
        if slots > self.held.pool.available:
            with self._deciding():
                self.policy.fit(beside)
        assert slots <= self.held.pool.available, "the policy freed less than was asked"

    def _goes_nowhere(self, sequence: PathSequence) -> bool:
        """Whether the reply is over, or so long that nothing can be drawn from its end."""
        return sequence.finish is Finish.END or sequence.length > self.held.pool.capacity

    def _end(self, sequence: PathSequence) -> None:
        """Nothing of it is held any more."""
        self._pay(sequence)
        self.sequences.remove(sequence)
        self.held.pool.free(np.array(sequence.slots, dtype=np.int64))

    def _close(self, sequence: PathSequence) -> None:
        """Boundary: the step is a block."""
        self._pay(sequence)
        self.sequences.remove(sequence)
        node, parent, tokens = sequence.branch.node, sequence.path.leaf, len(sequence.tokens)
        if self.held.add(node, sequence.block()):
            certain = float(confidence(sequence.logits, TOP))
            with self._deciding():
                self.policy.add_block(node, parent, tokens, certain)

    def _pay(self, sequence: PathSequence) -> None:
        """Book the attention that a step paid to the blocks above it."""
        at = 0
        for name, there in sequence.path.blocks:
            paid = sequence.paid[at : at + len(there)]
            self.held[name].later[there] += paid
            at += len(there)
            with self._deciding():
                self.policy.add_attention(name, float(paid.sum()), len(sequence.slots))

    def _land(self) -> None:
        """Give back what steps hold that will not be finished."""
        for sequence in self.sequences:
            self.held.pool.free(np.array(sequence.slots, dtype=np.int64))
        self.sequences.clear()

    def _step(self, sequence: PathSequence) -> Step:
        assert sequence.finish is not None, "a step that goes on"
        ended = sequence.finish is Finish.END
        text = self._text.decode(sequence.tokens, sequence.branch.tokens, last=ended)
        mean = sequence.logprob / len(sequence.tokens)
        return Step(tuple(sequence.tokens), text, sequence.finish, mean, sequence.entropy)

    def _run(self, readings: Sequence[SparseInput]) -> SparseOutput:
        """One pass, and what it costs."""
        read = self._forward.run(readings, self._store)
        rows = sum(len(reading.tokens) for reading in readings)
        seen = sum(np.searchsorted(r.places, r.positions, "right").sum() for r in readings)
        spent = self.spent
        spent.model_calls += 1
        spent.flops += self._forward.flops(rows, int(seen), len(readings))
        spent.kv_tokens_peak = max(spent.kv_tokens_peak, self.held.count)
        active = self._reading_now + sum(len(sequence.slots) for sequence in self.sequences)
        spent.active = max(spent.active, active)
        self._watch(spent, active, self.held.count)
        return read

    def _block(self, branch: Branch) -> int:
        block = self.held.block_of(branch.parent)
        assert block is not None, "checked when it was asked for"
        return block

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        before = self._clock()
        yield
        self.spent.policy_seconds += self._clock() - before
