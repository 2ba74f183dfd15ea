"""What a search has cost on SGLang servers, as their answers say.

SGLang tells no search's share of its KV: ``kv_tokens_peak`` is what the search's live steps hold.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.flops import Flops, sum_of_contexts
from runtime.live_paths import LivePaths
from search.counters import Counters

Path = tuple[int, ...]


@dataclass(slots=True)
class RequestCosts:
    """One search's costs, and the paths that it may come back to."""

    counters: Counters = field(default_factory=Counters)
    _held: int = 0
    _alive: LivePaths[Path] = field(default_factory=LivePaths)
    _own: dict[Path, int] = field(default_factory=dict)

    def read(self, flops: Flops, tokens: int, cached: int, *, known: bool) -> None:
        """A request's prefix was read, all but its ``cached`` first tokens.

        ``known``: all but the last token was in the cache once; that one, drawn but never read,
        belongs to decoding.
        """
        fresh = tokens - cached
        again = max(0, fresh - 1) if known else 0
        self.counters.cached_tokens += cached
        self.counters.prefilled_tokens += again if known else fresh
        self.counters.rehydrated_tokens += again
        self.counters.rehydrations += again > 0
        self.counters.flops += flops(fresh, sum_of_contexts(cached, fresh), 1)

    def drew(self, flops: Flops, prefix: int, tokens: int) -> None:
        """So many tokens were drawn after a prefix that was read."""
        self.counters.decoded_tokens += tokens
        self.counters.flops += flops(tokens - 1, sum_of_contexts(prefix, tokens - 1))

    def hold(self, node: int, path: Path, own: int) -> None:
        """The search may come back to this node, whose last ``own`` tokens are its step."""
        if self._alive.add(node, path):
            self._own[path] = own
            self._held += own
            self.counters.kv_tokens_peak = max(self.counters.kv_tokens_peak, self._held)

    def mark_dead(self, nodes: Iterable[int]) -> None:
        """The search will not come back to these."""
        for path in self._alive.mark_dead(nodes):
            self._held -= self._own.pop(path)

    def knows(self, path: Path) -> bool:
        """Whether a live step ends there."""
        return path in self._alive
