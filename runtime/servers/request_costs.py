"""A search's costs on servers, from its requests, and the paths that it may return to."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from runtime.accounting import Flops, LivePaths, no_flops, sum_of_contexts
from search.counters import Counters

Path = tuple[int, ...]


@dataclass(slots=True)
class RequestCosts:
    """One search's costs, and the paths that it may return to; ``flops``: of its policy."""

    flops: Flops = no_flops
    counters: Counters = field(default_factory=Counters)
    _held_tokens: int = 0
    _alive: LivePaths[Path] = field(default_factory=LivePaths)
    _step_tokens: dict[Path, int] = field(default_factory=dict)

    def read(self, tokens: int, cached: int, *, was_cached: bool, block: int = 1) -> None:
        """Count the reading of a request's prefix of ``tokens``, the first ``cached`` from cache.

        ``was_cached``: all but the last token was in the cache before; the last one, drawn but not
        read, belongs to decoding. ``block``: the server caches whole blocks of that many tokens.
        """
        fresh = tokens - cached
        expected = max(0, tokens - 1) // block * block if was_cached else 0
        rehydrated = max(0, expected - cached)
        self.counters.cached_tokens += cached
        self.counters.expected_tokens += expected
        self.counters.prefilled_tokens += max(0, fresh - 1) if was_cached else fresh
        self.counters.rehydrated_tokens += rehydrated
        self.counters.rehydrations += rehydrated > 0
        self.counters.flops += self.flops(fresh, sum_of_contexts(cached, fresh), 1)

    def add_decoded(self, prefix: int, tokens: int) -> None:
        """Count ``tokens`` tokens drawn after a prefix of ``prefix`` tokens that was read."""
        self.counters.decoded_tokens += tokens
        self.counters.flops += self.flops(tokens - 1, sum_of_contexts(prefix, tokens - 1))

    def hold(self, node: int, path: Path, step_tokens: int) -> None:
        """Keep a node that the search may return to; the last ``step_tokens`` are its step."""
        if self._alive.add(node, path):
            self._step_tokens[path] = step_tokens
            self._held_tokens += step_tokens
            self.counters.kv_tokens_peak = max(self.counters.kv_tokens_peak, self._held_tokens)

    def mark_dead(self, nodes: Iterable[int]) -> None:
        """Drop nodes that the search will not return to."""
        for path in self._alive.mark_dead(nodes):
            self._held_tokens -= self._step_tokens.pop(path)

    def knows(self, path: Path) -> bool:
        """Whether a step that is alive ends at this path."""
        return path in self._alive
