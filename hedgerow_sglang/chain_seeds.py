"""Chains of steps inside SGLang's scheduler: each row draws with the seed of its current step.

SGLang's overlap scheduler draws the next token before the host has seen the last one, so the end of
a step is noticed too late: a server with that scheduler takes no chains.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

from hedgerow_sglang.step_chain import CHAIN, ENDS, StepEnds, parse_chain, parse_ends

KEPT = 64
"""Most ``StepEnds`` that are kept, one for each set of stop strings; the oldest goes first."""
_known: OrderedDict[str, StepEnds] = OrderedDict()


def learn_ends(params: dict[str, Any]) -> None:
    """Keep the ``StepEnds`` that a request brings, if it brings any. Called before it is queued."""
    if ENDS not in params:
        return
    name, ends = parse_ends(params[ENDS])
    _known[name] = ends
    _known.move_to_end(name)
    while len(_known) > KEPT:
        _known.popitem(last=False)


def chain_seed(request: Any) -> int | None:
    """The seed of a request's next token, from its chain; None for a request without a chain.

    A chain that is over is marked to finish; the one token still drawn for it is discarded.
    """
    chain = getattr(request, CHAIN, None)
    if chain is None:
        params = request.sampling_params.custom_params or {}
        if CHAIN not in params:
            return None
        chain = parse_chain(params[CHAIN])
        setattr(request, CHAIN, chain)
    ends = _known.get(chain.ends)
    if ends is None:
        _end(request, f"{CHAIN}: ends: {chain.ends}; no request has brought it along")
        return chain.seeds[0]
    seed = chain.follow(request.output_ids, ends)
    if chain.over:
        _end(request, None)
    return seed


def next_seeds(batch: Any, *_: Any, **__: Any) -> None:
    """Before ``ScheduleBatch.prepare_for_decode``: set the seed of each chain's next token."""
    seeds = batch.sampling_info.sampling_seed
    if seeds is None:
        return
    for row, request in enumerate(batch.reqs):
        seed = chain_seed(request)
        if seed is not None:
            seeds[row] = seed


def _end(request: Any, fault: str | None) -> None:
    from sglang.srt.managers.schedule_batch import (  # pyright: ignore[reportMissingImports]
        FINISH_ABORT,
        FINISH_LENGTH,
    )

    if request.to_finish is None:
        length = len(request.output_ids) + 1
        request.to_finish = FINISH_LENGTH(length) if fault is None else FINISH_ABORT(fault)
