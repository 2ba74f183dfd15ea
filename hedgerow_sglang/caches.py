"""SGLang's radix caches by eviction order."""

from __future__ import annotations

from collections.abc import Mapping

from hedgerow_sglang.search_cache import SearchCache

CACHES: Mapping[str, type[SearchCache]] = {"arborkv": SearchCache}
"""By ``--kv-policy``; another order is a subclass with a ``_evict_key`` of its own."""
