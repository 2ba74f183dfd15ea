"""Find at start what is exact on this machine: sizes of torch's tiles, the compiled attention.

Matrix libraries choose kernels by shape. A tile size is used only if each of its rows has the same
bits as in the other sizes, at any place in the tile and with every number of threads that may be
used. The compiled library is used if it can be built and its rows come out right.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch import Tensor

from runtime.embedded.choices import Kernel
from runtime.embedded.model.attention import NativeAttention
from runtime.embedded.model.batch_plan import BLOCK, KVStore, Span, build_plan
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.layers import Weights, Workspace, cut, normalise, product
from runtime.embedded.model.native import MOST, MULTIPLE, Native, NotBuilt, native

_LOG = logging.getLogger(__name__)

ROW_TILES = (256, 192, 128, 96, 64, 56, 48, 40, 32, 24, 16, 12, 8, 6, 4, 2, 1)
QUERY_TILES = (16, 4, 2, 1)
_PROBED, _LEAST_PROBED = 32, 8
"""The most and the fewest rows whose products are compared; between them, as many as a tile has."""
_TOLERANCE = 1e-4
"""The largest allowed difference of the compiled attention from a plain softmax."""


@dataclass(frozen=True, slots=True)
class Tiles:
    """Tile sizes to use, descending: ``rows`` of matrix products (empty: no tiles), ``queries`` per
    key block."""

    rows: tuple[int, ...]
    queries: tuple[int, ...]


class Inexact(ValueError):
    """This machine's arithmetic cannot be made exact; the message says what differs."""


def check_tiles(
    weights: Weights, config: ModelConfig, threads: Sequence[int], *, attends: bool = True
) -> Tiles:
    """Find the tile sizes that are exact with 1 and each of ``threads`` threads. Raises Inexact if
    there are none.

    ``attends``: torch computes attention, so ``queries`` are checked, too.
    """
    counts, before = sorted({1, *threads}), torch.get_num_threads()
    try:
        rows = largest_agreeing(ROW_TILES, lambda tile: _row_products(weights, tile, counts))
        queries = QUERY_TILES
        if attends:
            queries = largest_agreeing(
                QUERY_TILES, lambda tile: _query_products(config, tile, counts)
            )
        _check_elementwise(config, counts)
    finally:
        torch.set_num_threads(before)
    unused = (
        *(f"row tile {tile}" for tile in ROW_TILES if tile not in rows),
        *(f"query tile {tile}" for tile in QUERY_TILES if tile not in queries),
    )
    if unused:
        _LOG.info("not bit-equal on this machine, so not used: %s", ", ".join(unused))
    return Tiles(rows, queries)


def largest_agreeing(
    candidates: Sequence[int], results: Callable[[int], Iterator[list[Tensor]]]
) -> tuple[int, ...]:
    """The largest set of candidates that give equal ``results``, descending. Raises Inexact."""
    classes: list[tuple[list[Tensor], list[int]]] = []
    for tile in candidates:
        steady = _steady(results(tile))
        if steady is None:
            continue
        for reference, members in classes:
            pairs = zip(reference, steady, strict=True)  # fewer rows of a smaller tile
            if all(torch.equal(a[: len(b)], b[: len(a)]) for a, b in pairs):
                members.append(tile)
                break
        else:
            classes.append((steady, [tile]))
    if not classes:
        raise Inexact("exact: on, but no tile size repeats its own bits here; off is needed")
    return tuple(max(classes, key=lambda pair: len(pair[1]))[1])


def _steady(results: Iterator[list[Tensor]]) -> list[Tensor] | None:
    """The first of each list of repetitions, or None if a repetition differs from it."""
    steady = []
    for repeats in results:
        if not all(torch.equal(repeats[0], other) for other in repeats[1:]):
            return None
        steady.append(repeats[0])
    return steady


def _row_products(weights: Weights, tile: int, threads: Sequence[int]) -> Iterator[list[Tensor]]:
    """Some rows' products with every shape of weight, at different places in the tile."""
    first, head = weights.layers[0], weights.head
    matrices = (first.qkv, first.output, first.up, first.down, *(() if head is None else (head,)))
    multiplied = [(matrix.inputs, matrix.times) for matrix in matrices]
    seed = torch.Generator().manual_seed(0)
    probed = min(_PROBED, max(_LEAST_PROBED, tile))
    tiles = cut(probed, (tile,))
    rows = tiles[-1][1]
    for inputs, multiply in (*multiplied, (first.gate.inputs, first.gate.gate)):
        x = torch.randn(max(ROW_TILES), inputs, generator=seed)[:rows]
        if rows >= 2 * probed:
            x[-probed:] = x[:probed]
            variants = [(x, (0, rows - probed))]
        else:
            place = rows - probed or 3
            variants = [(x, (0,)), (x.roll(place, 0), (place,))]
        repeats = []
        for count in threads:
            torch.set_num_threads(count)
            for variant, places in variants:
                out = product(variant, tiles, multiply)
                repeats += [out[(torch.arange(probed) + place) % rows] for place in places]
        yield repeats


def _query_products(
    config: ModelConfig, tile: int, threads: Sequence[int]
) -> Iterator[list[Tensor]]:
    """Scores and mixed values of 16 rows with 5 blocks, each block alone and among the others."""
    seed = torch.Generator().manual_seed(0)
    pairs, rows, group, size = 5, max(QUERY_TILES), config.group, config.head_dim
    keys = torch.randn(pairs, BLOCK, size, generator=seed)
    query = torch.randn(pairs, rows, group, size, generator=seed)
    weight = torch.rand(pairs, rows, group, BLOCK, generator=seed)
    for left, right in ((query, keys.transpose(1, 2)), (weight, keys)):
        repeats = []
        for count in threads:
            torch.set_num_threads(count)
            for shift in (0, 1):
                whole = _in_tiles(left.roll(shift, 1), right, tile)
                alone = [_in_tiles(left[i : i + 1], right[i : i + 1], tile) for i in range(pairs)]
                repeats += [whole.roll(-shift, 1), torch.cat(alone)]
        yield repeats


def _in_tiles(left: Tensor, right: Tensor, tile: int) -> Tensor:
    """(pairs, rows, group, n) x (pairs, n, m) -> (pairs, rows, group, m), ``tile`` rows at once."""
    pairs, rows, group, inner = left.shape
    cuts = rows // tile
    blocks = right.transpose(1, 2) if right.stride(1) == 1 else right
    blocks = blocks.repeat_interleave(cuts, 0)
    blocks = blocks.transpose(1, 2) if right.stride(1) == 1 else blocks
    out = torch.bmm(left.reshape(pairs * cuts, tile * group, inner), blocks)
    return out.view(pairs, rows, group, -1)


def _check_elementwise(config: ModelConfig, threads: Sequence[int]) -> None:
    """Raise Inexact if ``exp``, a norm or a row's sum depends on its place in the tensor."""
    seed = torch.Generator().manual_seed(0)
    x = torch.randn(65537, generator=seed) * 8
    rows = torch.randn(64, config.hidden, generator=seed)
    blocks = torch.rand(64, config.group, BLOCK, generator=seed)
    torch.set_num_threads(1)
    exact = x.exp(), normalise(rows, 1e-6, torch.empty_like(rows)), blocks.sum(-1)
    for count in threads:
        torch.set_num_threads(count)
        for start, end in ((0, 65537), (1, 65537), (5, 40003), (7, 24), (65536, 65537)):
            if not torch.equal(x[start:end].clone().exp(), exact[0][start:end]):
                raise Inexact(
                    f"exact: on, but exp differs at an offset of {start} with {count} threads"
                )
        for start, end in ((0, 64), (1, 2), (3, 7), (5, 36)):
            part = rows[start:end].clone()
            if not torch.equal(normalise(part, 1e-6, torch.empty_like(part)), exact[1][start:end]):
                raise Inexact(
                    f"exact: on, but a row's norm depends on its neighbours with {count} threads"
                )
            if not torch.equal(blocks[start:end].clone().sum(-1), exact[2][start:end]):
                raise Inexact(
                    f"exact: on, but a row's sum depends on its neighbours with {count} threads"
                )


def choose_kernel(kernel: Kernel, config: ModelConfig, threads: Sequence[int]) -> Native | None:
    """The library, checked to be exact with each of ``threads``, or None to use torch.

    Raises NotBuilt if ``kernel`` is ``native`` and the library cannot be used.
    """
    if kernel == "torch":
        return None
    try:
        _check_sizes(config)
        library = native()
        _check(library, config, threads)
    except NotBuilt as error:
        if kernel == "native":
            raise NotBuilt(f"kernel: 'native'; {error}") from error
        _warn_once(str(error))
        return None
    return library


def _check_sizes(config: ModelConfig) -> None:
    if config.head_dim % MULTIPLE or config.head_dim > MOST:
        needed = f"multiples of {MULTIPLE} up to {MOST} are needed"
        raise NotBuilt(f"heads of {config.head_dim} numbers; {needed}")
    if config.hidden % MULTIPLE:
        raise NotBuilt(f"rows of {config.hidden} numbers; multiples of {MULTIPLE} are needed")


@cache
def _warn_once(why: str) -> None:
    _LOG.warning("attention by torch, which takes longer: %s", why)


def _check(library: Native, config: ModelConfig, threads: Sequence[int]) -> None:
    """Raise NotBuilt if rows differ from a plain softmax, or have other bits computed alone."""
    shared, tail, rows = 2 * BLOCK + 3, BLOCK + 9, 5
    ends = shared + tail * np.arange(1, rows + 1)
    paths = [np.r_[0:shared, end - tail : end] for end in ends]
    new = (1, tail, 3, 1, BLOCK)
    spans = [Span(p[len(p) - n :], len(p) - n, p, n) for p, n in zip(paths, new, strict=True)]
    store = KVStore(replace(config, layers=1), int(ends[-1]))
    seed, before = torch.Generator().manual_seed(0), torch.get_num_threads()
    store.both[0].normal_(generator=seed)
    query = torch.randn(sum(new), config.heads, config.head_dim, generator=seed)
    query *= config.head_dim**-0.5
    try:
        torch.set_num_threads(1)
        expected = _attend_natively(library, config, spans, store, query)
        error = (expected - _attend_plainly(config, spans, store, query)).abs().max().item()
        if not error < _TOLERANCE:
            raise NotBuilt(f"it is off by {error:.1e} from a plain softmax")
        for count in threads:
            torch.set_num_threads(count)
            together = _attend_natively(library, config, spans, store, query)
            parts = zip(spans, query.split(new), strict=True)
            alone = torch.cat(
                [_attend_natively(library, config, [s], store, part) for s, part in parts]
            )
            if not torch.equal(together, expected) or not torch.equal(alone, expected):
                raise NotBuilt(f"a row's bits depend on the others, with {count} threads")
    finally:
        torch.set_num_threads(before)


def _attend_natively(
    library: Native,
    config: ModelConfig,
    spans: Sequence[Span],
    store: KVStore,
    query: Tensor,
) -> Tensor:
    """The library's attention, (rows, heads, head_dim) in span order."""
    plan = build_plan(spans, padding=store.padding, window=config.sliding_window)
    attention = NativeAttention(library, plan, config, Workspace())
    order = torch.from_numpy(plan.rows.order)
    out = torch.empty_like(query)
    attention.run(query[order], store.keys[0], store.values[0], out)
    return torch.empty_like(out).index_copy_(0, order, out)


def _attend_plainly(
    config: ModelConfig, spans: Sequence[Span], store: KVStore, query: Tensor
) -> Tensor:
    """As ``_attend_natively``, by a plain softmax over each row's keys."""
    keys, values = (
        x.view(config.kv_heads, store.rows, -1) for x in (store.keys[0], store.values[0])
    )
    outputs, window = [], config.sliding_window
    for span in spans:
        for position in range(span.start, len(span.slots)):
            since = 0 if window is None else max(0, position + 1 - window)
            visible = torch.from_numpy(span.slots[since : position + 1])
            heads = query[len(outputs)].view(config.kv_heads, config.group, -1)
            weights = torch.softmax(heads @ keys[:, visible].transpose(1, 2), -1)
            outputs.append((weights @ values[:, visible]).view(config.heads, -1))
    return torch.stack(outputs)
