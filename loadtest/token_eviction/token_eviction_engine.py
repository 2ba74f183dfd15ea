"""An engine that evicts tokens; scoring and embedding are another engine's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from loadtest.token_eviction.evicting_decoder import EvictingDecoder
from loadtest.token_eviction.sparse_forward import SparseForward
from loadtest.token_eviction.token_eviction_options import TokenEvictionOptions
from runtime.engine_wrapper import EngineWrapper
from runtime.text import Text
from search.capabilities import Capabilities
from search.counters import Counters, EngineCounters, combined
from search.engine import Branch, Engine, EngineError, Hint, PrefixTooLong, Sampling, Step, Usage
from search.tree import ROOT


class TokenEvictionModel:
    """A policy model for token eviction, loaded once for any number of engines."""

    def __init__(self, checkpoint: str | Path) -> None:
        """Raises ValueError for a checkpoint that cannot be used."""
        self.text = Text(checkpoint)
        self.forward = SparseForward(checkpoint)


class TokenEvictionEngine(EngineWrapper):
    """Draws by itself; all else is another engine's. Every tree's KV is its own, in a budget of its
    own, and lossy.

    One round at a time, in a thread. What a tree holds is in ``decoders`` while it lives, for tests
    and benchmarks.
    """

    def __init__(
        self,
        model: TokenEvictionModel,
        others: Engine,
        options: TokenEvictionOptions,
        new_decoder: Callable[..., EvictingDecoder] = EvictingDecoder,
    ) -> None:
        """``others`` scores and embeds; its own policy model, if it has one, draws nothing."""
        self.decoders: dict[str, EvictingDecoder] = {}
        super().__init__(others)
        self._model, self._options = model, options
        self._new_drawing = new_decoder
        self._hints: dict[str, list[Hint]] = {}
        self._stopped: set[str] = set()
        self._turn = asyncio.Lock()
        kept = f"{options.kv_policy}-{options.kv_tokens}-{options.share:g}"
        self._capabilities = replace(
            others.capabilities,
            engine="token_eviction",
            exact=False,
            context_tokens=min(model.text.context, others.capabilities.context_tokens),
            fingerprint=f"{others.capabilities.fingerprint}-{kept}",
        )

    @property
    def capabilities(self) -> Capabilities:
        """The other engine's, but not exact."""
        return self._capabilities

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch from what its path still holds."""
        context = self._capabilities.context_tokens
        for branch in branches:
            if len(branch.tokens) + branch.limit > context:
                raise PrefixTooLong(
                    f"a prefix of {len(branch.tokens)} tokens and a step of up to {branch.limit} "
                    f"do not fit the context of {context}"
                )
        async with self._turn:
            work = asyncio.ensure_future(asyncio.to_thread(self._expand, tree, branches, sampling))
            try:
                return await asyncio.shield(work)
            except asyncio.CancelledError:
                self._stopped.add(tree)  # nobody else may have the model before the thread ends
                with suppress(EngineError):
                    await work
                self._stopped.discard(tree)
                raise

    def hint(self, tree: str, hint: Hint) -> None:
        """Heard before the tree's next round."""
        self._hints.setdefault(tree, []).append(hint)
        self._engine.hint(tree, hint)

    async def release(self, tree: str) -> Counters:
        """Stop a tree's round at its next pass and let go of it; what it cost both engines."""
        self._stopped.add(tree)
        async with self._turn:
            self._stopped.discard(tree)
            self._hints.pop(tree, None)
            drawing = self.decoders.pop(tree, None)
        scored = await self._engine.release(tree)
        if drawing is None:
            return scored
        return combined(Counters, (drawing.spent, scored))

    async def abort(self, tree: str) -> None:
        """As ``release``."""
        await self._engine.abort(tree)
        await self.release(tree)

    async def usage(self) -> Usage:
        """The other engine's, with the policy model's KV of all trees here."""
        usage, decoders = await self._engine.usage(), list(self.decoders.values())
        return replace(
            usage,
            kv_tokens_active=sum(drawing.held.count for drawing in decoders),
            kv_tokens_cached=0,
            kv_tokens_capacity=self._options.kv_tokens * max(1, len(decoders)),
            kv_tokens_peak=max((drawing.spent.kv_tokens_peak for drawing in decoders), default=0),
            totals=EngineCounters.of(
                usage.totals,
                kv_policy_seconds=sum(drawing.spent.policy_seconds for drawing in decoders),
            ),
        )

    async def close(self) -> None:
        """Close the other engine."""
        await self._engine.close()

    def _expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        drawing = self.decoders.get(tree)
        if drawing is None:
            first = branches[0]
            if first.parent != ROOT:
                raise EngineError(f"parent: node {first.parent} of tree {tree!r} has no KV here")
            model = self._model
            drawing = self._new_drawing(model.forward, model.text, self._options, first.tokens)
            self.decoders[tree] = drawing
        for hint in self._hints.pop(tree, []):
            drawing.hint(hint)

        def must_go_on() -> None:
            if tree in self._stopped:
                raise EngineError(f"tree {tree!r} was aborted")

        return drawing.expand(branches, sampling, must_go_on)
