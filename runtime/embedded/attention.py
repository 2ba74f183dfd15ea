"""Attention in fixed pieces: (query tile) x (key block of 32), merged in block order.

softmax(q K / sqrt(d)) V of one row is sum_b e^(q K_b - m) V_b over sum_b e^(q K_b - m), with m the
exact maximum over all its keys, each block's two products in a tile of fixed size and the sums over
blocks taken in rising order. So a row's bits follow from its own query, keys and position alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from runtime.embedded.kernels import Workspace
from runtime.embedded.plan import BLOCK, Plan, Strip

_GATHER_BYTES = 1 << 21  # keys gathered at once stay in the second-level cache
_HIDDEN = -1e30


def attend(
    query: Tensor, keys: Tensor, values: Tensor, plan: Plan, out: Tensor, space: Workspace
) -> Tensor:
    """Fill the first rows of ``out`` (rows, heads x head_dim), in the plan's row order.

    ``query`` (rows, heads x head_dim), already scaled by 1 / sqrt(head_dim); ``keys`` and
    ``values`` of one layer as in ``KVStore``.
    """
    head_dim = keys.shape[1]
    count = len(plan.rows.tokens)
    kv_heads = len(plan.items) // sum(n for _, n in plan.columns)
    group = query.shape[1] // (kv_heads * head_dim)
    heads = query.view(-1, group * head_dim)
    scores = space.take("scores", plan.places, group, BLOCK)
    for strip in plan.strips:
        _score(heads, keys, strip, plan, kv_heads, scores, space)
    _hide(scores, plan, kv_heads, _HIDDEN)
    highest = scores.amax(-1).index_select(0, plan.items).view(-1, kv_heads * group)
    top = _columns(highest, plan, torch.maximum).view(count * kv_heads, group)
    scores.sub_(top.index_select(0, plan.query)[:, :, None])
    _hide(scores, plan, kv_heads, 0.0)  # exp is slow far below zero
    scores.exp_()
    _hide(scores, plan, kv_heads, 0.0)
    mixed = space.take("mixed", plan.places, group * head_dim)
    for strip in plan.strips:
        _mix(scores, values, strip, kv_heads, mixed, space)
    weight = scores.sum(-1).index_select(0, plan.items).view(-1, kv_heads * group)
    by_item = space.take("by_item", len(plan.items), group * head_dim)
    torch.index_select(mixed, 0, plan.items, out=by_item)
    total = _columns(by_item.view(-1, kv_heads * group * head_dim), plan, torch.add)
    weight = _columns(weight, plan, torch.add)
    shape = (count, kv_heads * group, head_dim)
    torch.div(total.view(shape), weight[:, :, None], out=out[:count].view(shape))
    return out


def _columns(items: Tensor, plan: Plan, combine: Callable[..., Tensor]) -> Tensor:
    """Combine every row's items in block order, in place: (items, n) -> (rows, n)."""
    result = items[: len(plan.rows.tokens)]
    for start, count in plan.columns[1:]:
        combine(result[:count], items[start : start + count], out=result[:count])
    return result


def _part(flat: Tensor, strip: Strip, kv_heads: int) -> Tensor:
    """A strip's part of a flat array (places, ...)."""
    return flat[strip.start : strip.start + strip.tiles * kv_heads * strip.size]


def _pieces(strip: Strip, kv_heads: int, head_dim: int) -> list[tuple[int, int]]:
    """Cut a strip into runs of (tile, head) pairs whose gathered keys stay in the cache."""
    step = max(1, _GATHER_BYTES // (4 * BLOCK * head_dim))
    pairs = strip.tiles * kv_heads
    return [(i, min(i + step, pairs)) for i in range(0, pairs, step)]


def _score(
    heads: Tensor,
    keys: Tensor,
    strip: Strip,
    plan: Plan,
    kv_heads: int,
    scores: Tensor,
    space: Workspace,
) -> None:
    """Products of a strip's queries with its keys: ``scores`` (places, group, BLOCK)."""
    head_dim = keys.shape[1]
    group = heads.shape[1] // head_dim
    pairs = strip.tiles * kv_heads
    wanted = _part(plan.query, strip, kv_heads)
    query = space.take("query_tiles", len(wanted), group * head_dim)
    torch.index_select(heads, 0, wanted, out=query)
    query = query.view(pairs, strip.size * group, head_dim)
    out = _part(scores, strip, kv_heads).view(pairs, strip.size * group, BLOCK)
    for start, end in _pieces(strip, kv_heads, head_dim):
        block = _gather(keys, strip, start, end, space)
        torch.bmm(query[start:end], block.transpose(1, 2), out=out[start:end])


def _mix(
    scores: Tensor, values: Tensor, strip: Strip, kv_heads: int, mixed: Tensor, space: Workspace
) -> None:
    """Products of a strip's weights with its values: ``mixed`` (places, group x head_dim)."""
    head_dim = values.shape[1]
    group = scores.shape[1]
    pairs = strip.tiles * kv_heads
    weights = _part(scores, strip, kv_heads).view(pairs, strip.size * group, BLOCK)
    out = _part(mixed, strip, kv_heads).view(pairs, strip.size * group, head_dim)
    for start, end in _pieces(strip, kv_heads, head_dim):
        block = _gather(values, strip, start, end, space)
        torch.bmm(weights[start:end], block, out=out[start:end])


def _gather(source: Tensor, strip: Strip, start: int, end: int, space: Workspace) -> Tensor:
    """Blocks of the (tile, head) pairs start .. end - 1: (pairs, BLOCK, head_dim)."""
    block = space.take("block", (end - start) * BLOCK, source.shape[1])
    torch.index_select(source, 0, strip.keys[start * BLOCK : end * BLOCK], out=block)
    return block.view(end - start, BLOCK, source.shape[1])


def _hide(scores: Tensor, plan: Plan, kv_heads: int, value: float) -> None:
    """Set the scores of keys that a row must not see."""
    for strip in plan.strips:
        if strip.masked_from < strip.tiles:
            shape = (strip.tiles, kv_heads, strip.size, -1, BLOCK)
            part = _part(scores, strip, kv_heads).view(shape)
            part[strip.masked_from :].masked_fill_(strip.mask, value)
