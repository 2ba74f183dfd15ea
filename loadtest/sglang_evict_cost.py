"""What making room costs SGLang's scheduler with our plug-in, an eviction; run in its environment.

Searches of 200 blocks fill a cache: prompts of 300 tokens, steps of 60 below random ones. Either
each stands at one block (``held``: the rest is what it may come back to), or at all of its leaves
(``next``: all of it is what its round reads, as with a policy by levels), and 64 requests wait.
Then room is made for 12 tokens, again and again, and once a hundred times a search brings a hint.

    .venv-sglang/bin/python -m loadtest.sglang_evict_cost [--searches 32]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from array import array
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.mem_cache.allocator.token import (  # pyright: ignore[reportMissingImports]
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.base_prefix_cache import (  # pyright: ignore[reportMissingImports]
    EvictParams,
    InsertParams,
)
from sglang.srt.mem_cache.cache_init_params import (  # pyright: ignore[reportMissingImports]
    CacheInitParams,
)
from sglang.srt.mem_cache.radix_cache import RadixKey  # pyright: ignore[reportMissingImports]

from hedgerow_sglang.plugin_protocol import NAME, Note, custom_params, parse_note
from hedgerow_sglang.search_cache import SearchCache

BLOCKS, PROMPT, STEP, WAITING, EVICTIONS, WANTED = 200, 300, 60, 64, 200, 12


def empty_cache() -> SearchCache:
    """A cache without a model."""
    params = CacheInitParams(
        disable=False,
        req_to_token_pool=None,
        token_to_kv_pool_allocator=TokenToKVPoolAllocator(1, torch.float16, "cpu", None, False),
        page_size=1,
    )
    return SearchCache(params)


def told(note: Note) -> Note:
    """A note as it arrives."""
    return parse_note(custom_params(note)[NAME])


def drawn(cache: Any, note: Note, prefix: array, step: array) -> None:
    """A request of a step ends."""
    cache.take_note(told(note))
    path = prefix + step
    cache.insert(InsertParams(key=RadixKey(path), value=torch.arange(len(path))))
    ended = SimpleNamespace(to_json=lambda: {"type": "stop"})
    cache._record_step(
        SimpleNamespace(
            sampling_params=SimpleNamespace(custom_params=custom_params(note)),
            finished=lambda: True,
            finished_reason=ended,
            origin_input_ids=prefix,
            output_ids_through_stop=step,
            cached_tokens=len(prefix),
            extra_key=None,
        )
    )


def filled(searches: int, *, active: bool, chance: random.Random) -> tuple[Any, list[Note]]:
    """A cache full of searches, and a hint of each for its second round."""
    cache, hints = empty_cache(), []
    for number in range(searches):
        tree = f"tree{number}"
        paths, inner = [array("q", [chance.randrange(900) for _ in range(PROMPT)])], set()
        for node in range(1, BLOCKS):
            parent = chance.randrange(node)
            inner.add(parent)
            step = array("q", [chance.randrange(900) for _ in range(STEP)])
            drawn(cache, Note(tree, PROMPT, node, parent, 1, active=(0,)), paths[parent], step)
            paths.append(paths[parent] + step)
        leaves = tuple(node for node in range(BLOCKS) if node not in inner)
        values = {node: chance.random() for node in range(1, BLOCKS)}
        hint = Note(tree, PROMPT, turn=2, values=values, active=leaves if active else leaves[:1])
        cache.take_note(told(hint))
        hints.append(hint)
    ask = [custom_params(Note(h.tree, PROMPT, BLOCKS, h.active[0], 2)) for h in hints]
    waiting = [
        SimpleNamespace(sampling_params=SimpleNamespace(custom_params=ask[n % len(ask)]))
        for n in range(WAITING)
    ]
    cache.queue = lambda: waiting
    return cache, hints


def measured(searches: int, *, active: bool) -> dict[str, Any]:
    """Milliseconds of processor time an eviction, and a hint."""
    cache, hints = filled(searches, active=active, chance=random.Random(0))
    tokens, evictions, notes = cache.total_size(), [], []
    for turn in range(EVICTIONS):
        begun = time.process_time()
        cache.evict(EvictParams(num_tokens=WANTED))
        evictions.append(1000 * (time.process_time() - begun))
        if turn % 100 == 50:
            hint = hints[turn % searches]
            again = told(Note(hint.tree, PROMPT, turn=3, values=hint.values, active=hint.active))
            begun = time.process_time()
            cache.take_note(again)
            notes.append(1000 * (time.process_time() - begun))
    return {
        "searches": searches,
        "standing": "next" if active else "held",
        "tokens": tokens,
        "evict_ms": statistics.median(evictions),
        "evict_ms_most": max(evictions),
        "hint_ms": statistics.median(notes),
    }


def main() -> None:
    """A row for each, as JSON."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.sglang_evict_cost")
    parser.add_argument("--searches", type=int, default=32)
    searches = parser.parse_args().searches
    rows = [measured(searches, active=active) for active in (False, True)]
    print(json.dumps({"rows": rows}, indent=2))


if __name__ == "__main__":
    main()
