"""Headers that tell a router in front of servers which requests belong together.

Whether the router heeds them is checked by the share of tokens that were cached.
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

log = logging.getLogger(__name__)

HEADERS = {"smg": "X-SMG-Routing-Key"}
"""Headers by router name. SMG, the SGLang model gateway, routes by this one under its policies
``manual`` and ``consistent_hashing``."""
NONE = "none"
PATTERN = r"^(none|smg|header:[A-Za-z0-9-]+)$"
KEY_BYTES = 12
LEAST_TOKENS = 1000
"""Tokens that must have been expected in the cache before a warning is given."""
LEAST_SHARE = 0.95
"""The least share of them that is cached if the router keeps trees together."""

_headers: ContextVar[Mapping[str, str] | None] = ContextVar("routing_headers", default=None)


def current_headers() -> Mapping[str, str]:
    """The routing headers of the tree that the current task works for."""
    return _headers.get() or {}


class Routing:
    """The header that every request of a tree carries for routers."""

    def __init__(self, name: str = NONE) -> None:
        """``name``: ``none``, ``smg``, or ``header:NAME`` for any router that keys on a header.

        Raises ValueError for any other name.
        """
        if re.match(PATTERN, name) is None:
            raise ValueError(f"routing: {name!r}; none, smg or header:NAME is needed")
        self.header = None if name == NONE else HEADERS.get(name, name.partition(":")[2])
        self._warned = False

    def headers(self, tree: str) -> dict[str, str]:
        """The headers of a tree's requests: the same hash for all, which hides the tree's name."""
        if self.header is None:
            return {}
        digest = hashlib.blake2b(tree.encode(), digest_size=KEY_BYTES).hexdigest()
        return {self.header: digest}

    @contextmanager
    def of(self, tree: str) -> Iterator[None]:
        """In this context requests, also of tasks created in it, carry the tree's headers."""
        token = _headers.set(self.headers(tree))
        try:
            yield
        finally:
            _headers.reset(token)

    def check(self, expected: int, missing: int) -> None:
        """Warn once if too many tokens were not cached for trees that are kept together;
        ``expected``: tokens that trees had read before, of which ``missing`` were not cached."""
        share = 1 - missing / max(1, expected)
        if self.header is None or self._warned or expected < LEAST_TOKENS or share >= LEAST_SHARE:
            return
        self._warned = True
        log.warning(
            "of %d tokens that searches had read before %.0f %% were cached: the router does not "
            "keep trees together, or their KV does not fit; does it heed the header %s?",
            *(expected, 100 * share, self.header),
        )


def unsigned(body: Mapping[str, Any]) -> Mapping[str, Any]:
    """A request with its seed's 64 bits unsigned, as routers demand."""
    params = body["sampling_params"]
    if params.get("sampling_seed", 0) >= 0:
        return body
    seed = params["sampling_seed"] + (1 << 64)
    return {**body, "sampling_params": {**params, "sampling_seed": seed}}
