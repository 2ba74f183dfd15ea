"""What a search has cost on SGLang servers, as their answers say.

SGLang tells no search's share of its KV: ``peak`` is what the search's live steps hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

from search.engine import TreeCost

Path = tuple[int, ...]


class Flops(Protocol):
    """Multiplies and adds of a forward pass, as ``runtime.embedded.model.config`` counts them."""

    def __call__(self, tokens: int, context_sum: int, logits: int | None = None, /) -> float: ...


def free(tokens: int, context_sum: int, logits: int | None = None) -> float:
    """The cost of a model whose shape is not known."""
    return 0.0


@dataclass(slots=True)
class Account:
    """One search's costs, and the paths that it may come back to."""

    decoded_tokens: int = 0
    prefilled_tokens: int = 0
    cached_tokens: int = 0
    rehydrated_tokens: int = 0
    rehydrations: int = 0
    prm_tokens: int = 0
    unparsed_verdicts: int = 0
    model_calls: int = 0
    flops: float = 0.0
    speculated_used: int = 0
    speculated_wasted: int = 0
    peak: int = 0
    _held: int = 0
    _paths: dict[int, Path] = field(default_factory=dict)
    _nodes: dict[Path, set[int]] = field(default_factory=dict)
    _own: dict[Path, int] = field(default_factory=dict)

    def read(self, flops: Flops, tokens: int, cached: int, *, known: bool) -> None:
        """A request's prefix was read, all but its ``cached`` first tokens.

        ``known``: all but the last token was in the cache once; that one, drawn but never read,
        belongs to decoding.
        """
        fresh = tokens - cached
        again = max(0, fresh - 1) if known else 0
        self.cached_tokens += cached
        self.prefilled_tokens += again if known else fresh
        self.rehydrated_tokens += again
        self.rehydrations += again > 0
        self.flops += flops(fresh, _contexts(cached, fresh), 1)

    def drew(self, flops: Flops, prefix: int, tokens: int) -> None:
        """So many tokens were drawn after a prefix that was read."""
        self.decoded_tokens += tokens
        self.flops += flops(tokens - 1, _contexts(prefix, tokens - 1))

    def hold(self, node: int, path: Path, own: int) -> None:
        """The search may come back to this node, whose last ``own`` tokens are its step."""
        nodes = self._nodes.setdefault(path, set())
        if not nodes:
            self._own[path] = own
            self._held += own
            self.peak = max(self.peak, self._held)
        nodes.add(node)
        self._paths[node] = path

    def bury(self, nodes: Iterable[int]) -> None:
        """The search will not come back to these."""
        for node in nodes:
            path = self._paths.pop(node, None)
            if path is None:
                continue
            self._nodes[path].discard(node)
            if not self._nodes[path]:
                del self._nodes[path]
                self._held -= self._own.pop(path)

    def knows(self, path: Path) -> bool:
        """Whether a live step ends there."""
        return path in self._nodes

    def cost(self) -> TreeCost:
        """The sums."""
        return TreeCost(
            decoded_tokens=self.decoded_tokens,
            prefilled_tokens=self.prefilled_tokens,
            cached_tokens=self.cached_tokens,
            prm_tokens=self.prm_tokens,
            model_calls=self.model_calls,
            flops=self.flops,
            kv_tokens_peak=self.peak,
            unparsed_verdicts=self.unparsed_verdicts,
            rehydrated_tokens=self.rehydrated_tokens,
            rehydrations=self.rehydrations,
            speculated_used=self.speculated_used,
            speculated_wasted=self.speculated_wasted,
        )


def _contexts(start: int, tokens: int) -> int:
    """The sum of the contexts of ``tokens`` rows at positions from ``start``, each with itself."""
    return tokens * start + tokens * (tokens + 1) // 2
