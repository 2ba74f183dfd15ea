"""Through a router that people already run: what tells it which requests belong together.

Of what a router returns it is seen, not trusted, whether it heeds that.
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
"""By name: what SMG (the SGLang model gateway) keys its policies ``manual`` and
``consistent_hashing`` on."""
NONE = "none"
PATTERN = r"^(none|smg|header:[A-Za-z0-9-]+)$"
KEY_BYTES = 12
LEAST_TOKENS = 1000
"""That were to be cached, before anything is said of it."""
LEAST_SHARE = 0.95
"""Of them, that are cached where trees are kept together."""

_headers: ContextVar[Mapping[str, str] | None] = ContextVar("routing_headers", default=None)


def current_headers() -> Mapping[str, str]:
    """Those of the tree that the running task works for."""
    return _headers.get() or {}


class Routing:
    """What every request of a tree says to a router, from its first on."""

    def __init__(self, name: str = NONE) -> None:
        """``name``: ``none``, ``smg``, or ``header:NAME`` for any router that keys on a header.

        Raises ValueError for another one.
        """
        if re.match(PATTERN, name) is None:
            raise ValueError(f"routing: {name!r}; none, smg or header:NAME is needed")
        self.header = None if name == NONE else HEADERS.get(name, name.partition(":")[2])
        self._warned = False

    def headers(self, tree: str) -> dict[str, str]:
        """Of a tree's requests: they have one key, which tells nothing of the tree."""
        if self.header is None:
            return {}
        digest = hashlib.blake2b(tree.encode(), digest_size=KEY_BYTES).hexdigest()
        return {self.header: digest}

    @contextmanager
    def of(self, tree: str) -> Iterator[None]:
        """Requests that are sent meanwhile, by tasks begun meanwhile too, are the tree's."""
        token = _headers.set(self.headers(tree))
        try:
            yield
        finally:
            _headers.reset(token)

    def check(self, expected: int, missing: int) -> None:
        """``missing`` of the tokens that trees had read before were not cached: said once where
        that are too many for trees that are kept together."""
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
    """A request as routers read it: its seed's 64 bits without a sign."""
    params = body["sampling_params"]
    if params.get("sampling_seed", 0) >= 0:
        return body
    seed = params["sampling_seed"] + (1 << 64)
    return {**body, "sampling_params": {**params, "sampling_seed": seed}}
