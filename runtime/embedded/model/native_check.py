"""Whether the compiled attention is used: where it can be had, and was seen to be exact."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.kernels import Workspace
from runtime.embedded.model.kv_store import KVStore
from runtime.embedded.model.native import MOST, MULTIPLE, Kernel, Native, NotBuilt, native
from runtime.embedded.model.native_attention import NativeAttention
from runtime.embedded.model.plan import BLOCK, Span, build_plan

_LOG = logging.getLogger(__name__)
_TOLERANCE = 1e-4


def chosen(kernel: Kernel, config: ModelConfig, threads: Sequence[int]) -> Native | None:
    """The library, seen to be exact with each of ``threads``, or None for torch's products.

    Raises NotBuilt where ``native`` is asked for and cannot be had.
    """
    if kernel == "torch":
        return None
    try:
        _fit(config)
        library = native()
        _check(library, config, threads)
    except NotBuilt as error:
        if kernel == "native":
            raise NotBuilt(f"kernel: 'native'; {error}") from error
        _say_once(str(error))
        return None
    return library


def _fit(config: ModelConfig) -> None:
    if config.head_dim % MULTIPLE or config.head_dim > MOST:
        needed = f"multiples of {MULTIPLE} up to {MOST} are needed"
        raise NotBuilt(f"heads of {config.head_dim} numbers; {needed}")
    if config.hidden % MULTIPLE:
        raise NotBuilt(f"rows of {config.hidden} numbers; multiples of {MULTIPLE} are needed")


@cache
def _say_once(why: str) -> None:
    _LOG.warning("attention by torch, which takes longer: %s", why)


def _check(library: Native, config: ModelConfig, threads: Sequence[int]) -> None:
    """Raise NotBuilt if rows come out other than a softmax has them, or other bits alone."""
    shared, own, rows = 2 * BLOCK + 3, BLOCK + 9, 5
    ends = shared + own * np.arange(1, rows + 1)
    paths = [np.r_[0:shared, end - own : end] for end in ends]
    new = (1, own, 3, 1, BLOCK)
    spans = [Span(p[len(p) - n :], len(p) - n, p, n) for p, n in zip(paths, new, strict=True)]
    store = KVStore(replace(config, layers=1), int(ends[-1]))
    seed, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    store.both[0].normal_(generator=seed)
    query = torch.randn(sum(new), config.heads, config.head_dim, generator=seed)
    query *= config.head_dim**-0.5
    try:
        torch.set_num_threads(1)
        found = _attended(library, config, spans, store, query)
        error = (found - _plainly(config, spans, store, query)).abs().max().item()
        if not error < _TOLERANCE:
            raise NotBuilt(f"it is off by {error:.1e} from a plain softmax")
        for count in threads:
            torch.set_num_threads(count)
            together = _attended(library, config, spans, store, query)
            parts = zip(spans, query.split(new), strict=True)
            alone = torch.cat([_attended(library, config, [s], store, own) for s, own in parts])
            if not torch.equal(together, found) or not torch.equal(alone, found):
                raise NotBuilt(f"a row's bits depend on the others, with {count} threads")
    finally:
        torch.set_num_threads(before)


def _attended(
    library: Native,
    config: ModelConfig,
    spans: Sequence[Span],
    store: KVStore,
    query: Tensor,
) -> Tensor:
    """(rows, heads, head_dim) in span order."""
    plan = build_plan(spans, padding=store.padding, window=config.sliding_window)
    attention = NativeAttention(library, plan, config, Workspace())
    order = torch.from_numpy(plan.rows.order)
    out = torch.empty_like(query)
    attention.run(query[order], store.keys[0], store.values[0], out)
    return torch.empty_like(out).index_copy_(0, order, out)


def _plainly(config: ModelConfig, spans: Sequence[Span], store: KVStore, query: Tensor) -> Tensor:
    """The same by a softmax over each row's keys."""
    keys, values = (
        x.view(config.kv_heads, store.rows, -1) for x in (store.keys[0], store.values[0])
    )
    found, window = [], config.sliding_window
    for span in spans:
        for position in range(span.start, len(span.slots)):
            since = 0 if window is None else max(0, position + 1 - window)
            seen = torch.from_numpy(span.slots[since : position + 1])
            heads = query[len(found)].view(config.kv_heads, config.group, -1)
            weights = torch.softmax(heads @ keys[:, seen].transpose(1, 2), -1)
            found.append((weights @ values[:, seen]).view(config.heads, -1))
    return torch.stack(found)
