"""An engine that draws one tree's steps from paths of which only some tokens are held.

A wave: the policy gets the active paths (transition), their missing tokens are computed if the
policy rehydrates, and then all branches decode side by side. The noise is that of the other
engines, so with room for everything the steps are the same.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import torch

from kvpolicy.eviction_order import Infeasible
from kvpolicy.token_allocation import Floors
from kvpolicy.value import confidence
from loadtest.token_eviction.path_cache import PartialPath, PathCache, PathReader
from loadtest.token_eviction.token_cache import CachedBlock, TokenCache
from loadtest.token_eviction.token_eviction_policies import policy_for
from runtime.embedded.sampler import sample
from runtime.engine_wrapper import EngineWrapper
from runtime.servers.drawn_step import DrawnStep
from runtime.stop_strings import StopStringTables
from search.counters import Counters, combined
from search.engine import (
    Branch,
    Capabilities,
    Engine,
    EngineError,
    Hint,
    KvFull,
    PrefixTooLong,
    Sampling,
    Step,
)
from search.tree import Finish

PLACES = 64
"""The most branches of a wave."""
TOP = 64
"""Equation (1): tokens whose terms of the entropy are counted one by one."""


class TokenEvictionEngine(EngineWrapper):
    """Draws one tree in a budget of its own, with losses; all else is another engine's.

    ``spent``: what the tree has cost; ``active_peak``: the most that a wave read of it;
    ``again_seconds``: making paths whole again; ``policy_seconds``: deciding what to evict.
    """

    def __init__(
        self,
        reader: PathReader,
        others: Engine,
        prompt: Sequence[int],
        kv_policy: str,
        kv_tokens: int,
        *,
        share: float,
        floors: Floors,
    ) -> None:
        """``others`` scores and embeds. ``kv_policy``: one of ``TOKEN_EVICTION``; ``kv_tokens``:
        what the tree may hold; ``share`` and ``floors`` as of ``policy_for``."""
        super().__init__(others)
        self.spent, self.active_peak = Counters(), 0
        self.again_seconds = self.policy_seconds = 0.0
        self._reader, self._stops = reader, StopStringTables(reader.text.pieces)
        self._paths: dict[int, CachedBlock] = {}
        """The blocks that the wave reads."""
        self._under_way = 0
        """Tokens held of the steps under way."""
        cache, tokens = PathCache([reader.nothing]), np.array(prompt, dtype=np.int64)
        reader.read(cache, tokens[None], np.arange(len(tokens))[None])
        whole = CachedBlock(-1, 0, tokens, cache.kv_read(0), cache.paid[0])
        self.held = TokenCache(kv_tokens, whole)
        self.policy = policy_for(kv_policy, self.held, share=share, floors=floors)
        self._count_pass(prefilled=len(tokens))

    @property
    def capabilities(self) -> Capabilities:
        """The other engine's, but not exact."""
        return replace(self._engine.capabilities, engine="token_eviction", exact=False)

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch, in the order asked.

        Raises PrefixTooLong for a path that does not fit the budget with its step, whose last token
        may stand beyond it, and EngineError for an unknown parent.
        """
        for branch in branches:
            if len(branch.tokens) + branch.limit - 1 > self.held.capacity:
                raise PrefixTooLong(
                    f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
                    f"do not fit kv_tokens {self.held.capacity}"
                )
            if branch.parent not in self.held.block_of:
                raise EngineError(f"parent: node {branch.parent} has no KV here")
        steps: list[Step] = []
        try:
            while len(steps) < len(branches):
                steps += self._draw(self._fitting(branches[len(steps) :]), sampling)
        except Infeasible as error:
            raise KvFull(str(error)) from error
        finally:
            self._under_way = 0
        return steps

    def hint(self, tree: str, hint: Hint) -> None:
        """Pass on a hint; dead blocks are dropped at once."""
        super().hint(tree, hint)
        block_of = self.held.block_of
        with self._deciding():
            dead = self.held.mark_dead(hint.dead)
            values = {block_of[n]: value for n, value in hint.values.items() if n in block_of}
            outlook = dict.fromkeys(block_of[n] for n in hint.outlook if n in block_of)
            self.policy.transition(Hint(values, dead=tuple(dead), outlook=tuple(outlook)))

    async def release(self, tree: str) -> Counters:
        """What the tree has cost both engines."""
        return combined(Counters, (self.spent, await super().release(tree)))

    def _fitting(self, branches: Sequence[Branch]) -> Sequence[Branch]:
        """As many of the first branches as fit, floors of other blocks included; at least one.

        The last token of a single branch may exceed the budget: its KV is not held then.
        """
        paths: dict[int, CachedBlock] = {}
        steps = 0
        for count, branch in enumerate(branches[:PLACES]):
            paths |= self.held.chain(self.held.block_of[branch.parent])
            steps += branch.limit
            needed = steps + sum(len(block.tokens) for block in paths.values())
            if count and needed + self.policy.reserved(set(paths)) > self.held.capacity:
                return branches[:count]
        return branches[:PLACES]

    def _draw(self, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """A wave's steps, all of its branches in every pass until each has ended."""
        leaves = [self.held.block_of[branch.parent] for branch in branches]
        logits = self._arrive(sorted(set(leaves)))
        cache = PathCache([self.held.path(leaf) for leaf in leaves])
        cache.logits = np.stack([logits[leaf] for leaf in leaves])
        ends = self._stops.of(sampling.stop), self._reader.text.eos
        going = steps = [DrawnStep(branch, sampling, *ends) for branch in branches]
        while going:
            self._choose(going, cache)
            going = self._let_go(going, cache, self._goes_nowhere)
            if going:
                self._feed(going, cache)
                going = self._let_go(going, cache, lambda step: step.finish is not None)
        return [step.step(self._reader.text) for step in steps]

    def _arrive(self, leaves: Sequence[int]) -> dict[int, np.ndarray]:
        """Transition: activate the paths down to these blocks, made whole if the policy rehydrates.
        Logits (vocab,) after each."""
        with self._deciding():
            self.policy.enter(leaves)
        self._paths = {k: block for leaf in leaves for k, block in self.held.chain(leaf).items()}
        if self.policy.rehydrates:
            self._make_room(sum(block.missing for block in self._paths.values()), beside=0)
        else:
            ends = [self._paths[leaf] for leaf in leaves]
            lost = sum(len(block.tokens) - 1 not in block.there for block in ends)
            self._make_room(lost, beside=lost)
        return {leaf: self._read_end(leaf) for leaf in leaves}

    def _read_end(self, leaf: int) -> np.ndarray:
        """Logits (vocab,) after a path. Its last token is always read again, since drawing needs
        it, and so are its missing tokens if the policy rehydrates."""
        start, path, chain = time.perf_counter(), self.held.path(leaf), self.held.chain(leaf)
        last = chain[leaf].end - 1
        again = np.setdiff1d(np.arange(last + 1), path.places)
        rows = np.union1d(again, [last]) if self.policy.rehydrates else np.array([last])
        indices = np.flatnonzero(~np.isin(path.places, rows))
        cache = PathCache([PartialPath(path.places[indices], path.kv[..., indices, :])])
        tokens = np.concatenate([block.tokens for block in chain.values()])
        self._reader.read(cache, tokens[rows][None], rows[None])
        new = cache.kv_read(0)
        for block in chain.values():
            block.put(rows, new)
        self._count_pass(prefilled=len(rows))
        if self.policy.rehydrates and len(again):
            self.spent.rehydrations += 1
            self.spent.rehydrated_tokens += len(again)
            self.again_seconds += (time.perf_counter() - start) * len(again) / len(rows)
        return cache.logits[0]

    def _choose(self, steps: Sequence[DrawnStep], cache: PathCache) -> None:
        """Draw each one's next token."""
        samples = sample(
            cache.logits,
            np.array([step.branch.seed for step in steps], dtype=np.uint64),
            [len(step.path) for step in steps],
            steps[0].sampling.temperature,
            steps[0].sampling.top_p,
        )
        for step, token, logprob, entropy in zip(steps, *samples, strict=True):
            step.add([(int(token), float(logprob))])
            step.entropy = float(entropy)
        self.spent.decoded_tokens += len(steps)

    def _feed(self, steps: Sequence[DrawnStep], cache: PathCache) -> None:
        """Make room if need be (pressure), then read one row each: the token just drawn."""
        self._make_room(len(steps), beside=len(steps))
        tokens = np.array([step.tokens[-1:] for step in steps])
        self._reader.read(cache, tokens, np.array([[len(step.path) - 1] for step in steps]))
        self._under_way += len(steps)
        self._count_pass()

    def _goes_nowhere(self, step: DrawnStep) -> bool:
        """Whether the reply is over, or so long that nothing can be drawn from its end."""
        return step.finish is Finish.END or len(step.path) > self.held.capacity

    def _let_go(
        self, steps: list[DrawnStep], cache: PathCache, over: Callable[[DrawnStep], bool]
    ) -> list[DrawnStep]:
        """Close the steps that are ``over``; return the others."""
        going = []
        for row, step in enumerate(steps):
            if over(step):
                self._close(step, cache, row)
            else:
                going.append(row)
        if len(going) < len(steps):
            cache.batch_select_indices(torch.tensor(going, dtype=torch.int64))
        return [steps[row] for row in going]

    def _close(self, step: DrawnStep, cache: PathCache, row: int) -> None:
        """Add the attention that a step paid to the blocks above it. Boundary: it becomes a block
        if all of it was read; else none of it is held any more."""
        leaf, node, read = self.held.block_of[step.branch.parent], step.branch.node, cache.read
        places, paid = cache.places[row], cache.paid[row]
        for name, block in self.held.chain(leaf).items():
            mine = paid[(places >= block.start) & (places < block.end)]
            block.later[block.there] += mine
            with self._deciding():
                self.policy.add_attention(name, float(mine.sum()), read)
        self._under_way -= read
        if read < len(step.tokens):
            return
        tokens, within = np.array(step.tokens, dtype=np.int64), paid[-read:]
        block = CachedBlock(leaf, len(step.branch.tokens), tokens, cache.kv_read(row), within)
        if self.held.add(node, block):
            certain = float(confidence(cache.logits[row], TOP))
            with self._deciding():
                self.policy.add_block(node, leaf, read, certain)

    def _make_room(self, tokens: int, beside: int) -> None:
        """Make room for ``tokens``, ``beside`` of which active paths are not to hold."""
        remaining = self.held.capacity - self._under_way
        if self.held.count + tokens > remaining:
            with self._deciding():
                self.policy.fit(remaining - beside)

    def _count_pass(self, prefilled: int = 0) -> None:
        """Count what a pass has cost, and the tokens read and held after it."""
        active = self._under_way + sum(len(block.there) for block in self._paths.values())
        held_tokens = self._under_way + self.held.count
        self.spent.kv_tokens_peak = max(self.spent.kv_tokens_peak, held_tokens)
        self.spent.prefilled_tokens += prefilled
        self.spent.model_calls += 1
        self.active_peak = max(self.active_peak, active)

    @contextmanager
    def _deciding(self) -> Iterator[None]:
        before = time.perf_counter()
        yield
        self.policy_seconds += time.perf_counter() - before
