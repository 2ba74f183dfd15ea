"""Recorded requests against SGLang's own scheduling, without a model: what its cache reads again.

Run in SGLang's environment. Its radix caches (the stock one, by age, and our plug-in's), its
allocator, its order of the queue, its rule for who may begin and what it takes back when the pool
is full are SGLang's; the loop around them is its scheduler's, a pass at a time, and what the model
would draw is what was recorded. A search asks for its next round when the last one is drawn.

    .venv-sglang/bin/python -m loadtest.sglang_replay RECORDING.json < MODES.json
"""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.managers.schedule_batch import (  # pyright: ignore[reportMissingImports]
    FINISH_LENGTH,
    Req,
)
from sglang.srt.managers.schedule_policy import (  # pyright: ignore[reportMissingImports]
    AddReqResult,
    PrefillAdder,
    SchedulePolicy,
)
from sglang.srt.mem_cache.allocation import (  # pyright: ignore[reportMissingImports]
    alloc_token_slots,
)
from sglang.srt.mem_cache.allocator.token import (  # pyright: ignore[reportMissingImports]
    TokenToKVPoolAllocator,
)
from sglang.srt.mem_cache.cache_init_params import (  # pyright: ignore[reportMissingImports]
    CacheInitParams,
)
from sglang.srt.mem_cache.common import (  # pyright: ignore[reportMissingImports]
    checkpoint_kv_cache,
    evict_from_tree_cache,
    release_kv_cache,
)
from sglang.srt.mem_cache.memory_pool import (  # pyright: ignore[reportMissingImports]
    ReqToTokenPool,
)
from sglang.srt.mem_cache.unified_cache.components import (  # pyright: ignore[reportMissingImports]
    ComponentType,
)
from sglang.srt.mem_cache.unified_radix_cache import (  # pyright: ignore[reportMissingImports]
    UnifiedRadixCache,
)
from sglang.srt.runtime_context import get_context  # pyright: ignore[reportMissingImports]
from sglang.srt.sampling.sampling_params import (  # pyright: ignore[reportMissingImports]
    SamplingParams,
)

from hedgerow_sglang.plugin_protocol import NAME, parse_note
from hedgerow_sglang.search_cache import SearchCache
from loadtest.least_read import (
    RequestDraw,
    RequestEnd,
    RequestEvent,
    RequestStart,
    TokenTrie,
    least_read_again,
)
from runtime.sglang.round_gate import RoundGate
from search.engine import Branch

MOST_AT_ONCE = 256
CONTEXT = 4096
PREFILL_TOKENS = 16_384
CHUNK_TOKENS = 2_048
FIRST_RATIO, LEAST_RATIO, RATIO_STEPS = 0.7, 0.7 * 0.14, 600
"""SGLang's estimate of which share of their limit requests draw, and how it falls."""
RETRACT_STEPS = 20
TURNS = 12
"""Turns of the event loop after which every search has sent its next requests."""


@dataclass(frozen=True, slots=True)
class RecordedRequest:
    """What a request reads, what it draws, the most that it may draw, and its note."""

    prefix: Sequence[int]
    step: Sequence[int]
    limit: int
    note: str

    @property
    def branch(self) -> Branch:
        """The branch that a search would ask for, of no particular node."""
        return Branch(0, 0, tuple(self.prefix), 0, self.limit, 0)

    def begin(self, most: int) -> RecordedRequest:
        """The request that draws its first ``most`` tokens."""
        return replace(self, step=self.step[:most], limit=min(self.limit, most))

    def go_on(self, most: int) -> RecordedRequest:
        """The request that draws the rest."""
        prefix = [*self.prefix, *self.step[:most]]
        return replace(self, prefix=prefix, step=self.step[most:], limit=self.limit - most)


@dataclass(eq=False, slots=True)
class Replayed:
    """A request under way: what it draws, who waits for it, and its number as it is served."""

    req: Any
    script: tuple[int, ...]
    done: asyncio.Future[None]
    number: int = -1


@dataclass(slots=True)
class CachedOnce:
    """All tokens that were cached once, by their paths."""

    _trie: TokenTrie = field(default_factory=TokenTrie)
    _cached: set[int] = field(default_factory=set)

    def again(self, tokens: Sequence[int], cached: int) -> int:
        """How many tokens of a path beyond its first ``cached`` ones were cached once."""
        return sum(at in self._cached for at in self._trie.walk(tokens)[cached:])

    def add(self, tokens: Sequence[int]) -> None:
        """Note that all tokens of a path are cached now."""
        self._cached.update(self._trie.walk(tokens))


class ReplayedServer:
    """One server: its pool, its cache, its queue, and what runs."""

    def __init__(self, pool: int, *, evicts: bool, queue: str) -> None:
        self.allocator = TokenToKVPoolAllocator(pool, torch.float16, "cpu", None, False)
        self.rows = ReqToTokenPool(MOST_AT_ONCE, CONTEXT, "cpu", False)
        params = CacheInitParams(
            disable=False,
            req_to_token_pool=self.rows,
            token_to_kv_pool_allocator=self.allocator,
            page_size=1,
        )
        params.tree_components = (ComponentType.FULL,)
        self.cache = SearchCache(params) if evicts else UnifiedRadixCache(params)
        self.evicts = evicts
        self.waiting: list[Any] = []
        self.running: list[Replayed] = []
        self.passes = self.again = self.begin_count = 0
        self.held_passes = 0
        """Passes for which rounds were held back, summed over all rounds."""
        self.served: list[RequestEvent] = []
        self._policy = SchedulePolicy(queue, self.cache, False, False, False)
        self._of: dict[str, Replayed] = {}
        self._ever_cached = CachedOnce()
        self._full = False
        self._ratio = FIRST_RATIO
        if evicts:
            self.cache.queue = lambda: self.waiting

    def note(self, text: str) -> None:
        """Pass on a request's note, as the plug-in's hook does."""
        if self.evicts:
            self.cache.take_note(parse_note(text))

    async def serve(self, draws: Iterable[RecordedRequest]) -> None:
        """Serve a list of requests until the last one is answered."""
        loop = asyncio.get_running_loop()
        futures = []
        for draw in draws:
            self.note(draw.note)
            custom = {NAME: draw.note}
            sampling = SamplingParams(max_new_tokens=draw.limit, custom_params=custom)
            req = Req(f"r{len(self._of)}", "", array("q", draw.prefix), sampling)
            work = Replayed(req, tuple(draw.step), loop.create_future())
            self._of[req.rid] = work
            self.waiting.append(req)
            futures.append(work.done)
        await asyncio.gather(*futures)

    def step(self) -> bool:
        """Run one pass, a prefill if a request may begin, else a decode; False if there is none."""
        prefilled = self._prefill()
        if not prefilled and not self.running:
            return False
        self.passes += 1
        if not prefilled:
            self._decode()
        return True

    def _prefill(self) -> bool:
        if not self.running:
            self._full = False
        if self._full or not self.waiting:
            return False
        self._policy.calc_priority(self.waiting, None)
        batch = SimpleNamespace(reqs=[work.req for work in self.running])
        adder = PrefillAdder(
            1, self.cache, self.allocator, batch, self._ratio, PREFILL_TOKENS, CHUNK_TOKENS
        )
        for req in self.waiting:
            if adder.budget_state() == AddReqResult.OTHER:
                break
            if len(adder.can_run_list) >= self.rows.available_size():
                self._full = True
                break
            req.init_next_round_input(self.cache)
            status = adder.add_one_req(req, has_chunked_req=False, truncation_align_size=None)
            if status != AddReqResult.CONTINUE:
                if status == AddReqResult.NO_TOKEN:
                    self._full = bool(adder.can_run_list or self.running)
                break
        reqs = list(adder.can_run_list)
        if not reqs:
            return False
        assert adder.new_chunked_req is None, "prompts are shorter than a chunk"
        rids = {req.rid for req in reqs}
        self.waiting = [req for req in self.waiting if req.rid not in rids]
        self._extend([self._of[req.rid] for req in reqs])
        return True

    def _extend(self, works: Sequence[Replayed]) -> None:
        """Read what is missing of these requests' prefixes, and draw their first tokens."""
        prefixes = [self.cache.prefix_device_indices(work.req) for work in works]
        self.rows.alloc([work.req for work in works])
        lengths = [len(work.req.full_untruncated_fill_ids) for work in works]
        slots = alloc_token_slots(
            self.cache,
            sum(length - work.req.prefix_len for length, work in zip(lengths, works, strict=True)),
        )
        for work, prefix, length in zip(works, prefixes, lengths, strict=True):
            req, fresh = work.req, length - work.req.prefix_len
            row = req.kv.req_pool_idx
            self.rows.write((row, slice(0, req.prefix_len)), prefix.to(torch.int32))
            self.rows.write((row, slice(req.prefix_len, length)), slots[:fresh].to(torch.int32))
            slots = slots[fresh:]
            req.kv.kv_allocated_len = req.kv.kv_committed_len = length
            req.cached_tokens += req.prefix_len
            self._begin(work)
        for work in works:
            self._ever_cached.add(work.req.full_untruncated_fill_ids)
        for work in works:
            if not self._draw(work):
                checkpoint_kv_cache(work.req, self.cache)
                self.running.append(work)

    def _begin(self, work: Replayed) -> None:
        """Note that a request begins."""
        tokens = tuple(work.req.full_untruncated_fill_ids)
        work.number, self.begin_count = self.begin_count, self.begin_count + 1
        self.again += self._ever_cached.again(tokens[:-1], work.req.prefix_len)
        self.served += [
            RequestStart(work.number, tokens[:-1]),
            RequestDraw(work.number, tokens[-1:]),
        ]

    def _draw(self, work: Replayed) -> bool:
        """Draw a request's next token; whether it was the last."""
        req = work.req
        if len(req.output_ids) < len(work.script):
            req.output_ids.append(work.script[len(req.output_ids)])
        if len(req.output_ids) < len(work.script):
            return False
        req.finished_reason = FINISH_LENGTH(len(req.output_ids))
        release_kv_cache(req, self.cache, checkpoint=True)
        self.served.append(RequestEnd(work.number))
        work.done.set_result(None)
        self._full = False
        return True

    def _decode(self) -> None:
        self._make_room()
        slots = alloc_token_slots(self.cache, len(self.running))
        for work, slot in zip(self.running, slots, strict=True):
            req = work.req
            self.rows.write((req.kv.req_pool_idx, req.kv.kv_allocated_len), slot.to(torch.int32))
            req.kv.kv_allocated_len += 1
            req.kv.kv_committed_len += 1
            self.served.append(RequestDraw(work.number, (req.output_ids[-1],)))
            self._ever_cached.add((*req.origin_input_ids, *req.output_ids))
        self._ratio = max(LEAST_RATIO, self._ratio - (FIRST_RATIO - LEAST_RATIO) / RATIO_STEPS)
        self.running = [work for work in self.running if not self._draw(work)]

    def _make_room(self) -> None:
        """Retract the requests that have drawn least until there is room for a token each."""
        while True:
            needed = len(self.running)
            evict_from_tree_cache(self.cache, needed)
            if self.allocator.available_size() >= needed:
                return
            assert needed > 1, "the pool is smaller than one request"
            work = min(
                self.running,
                key=lambda work: (len(work.req.output_ids), -len(work.req.origin_input_ids)),
            )
            self.running.remove(work)
            release_kv_cache(work.req, self.cache, checkpoint=False)
            self.served.append(RequestEnd(work.number))
            evict_from_tree_cache(self.cache, len(self.running) * RETRACT_STEPS)
            work.req.reset_for_retract()
            self.waiting.append(work.req)
            self._full = False
            drawn_tokens = sum(len(work.req.output_ids) for work in self.running)
            most = sum(work.req.sampling_params.max_new_tokens for work in self.running)
            self._ratio = min(1.0, (drawn_tokens + RETRACT_STEPS * len(self.running)) / (most + 1))


async def _search(server: ReplayedServer, gate: RoundGate, recording: dict[str, Any]) -> None:
    tree = recording["tree"]
    for round_ in recording["rounds"]:
        draws = [RecordedRequest(*draw) for draw in round_["draws"]]
        branches = [draw.branch for draw in draws]
        start = server.passes
        await gate.enter(tree, gate.need(branches))
        server.held_passes += server.passes - start
        most = gate.tokens_at_once(branches)
        if round_["reads"]:
            await server.serve(RecordedRequest(*read) for read in round_["reads"])
        await server.serve(draw.begin(most) for draw in draws)
        if longer := [draw.go_on(most) for draw in draws if len(draw.step) > most]:
            await server.serve(longer)
        gate.record(tree, branches, [tuple(draw.step) for draw in draws])
    server.note(recording["over"])
    gate.leave(tree)


async def replay(searches: Sequence[dict[str, Any]], mode: dict[str, Any]) -> dict[str, Any]:
    """Serve all of these at once in a pool; ``mode``: pool, evicts, queue, and whether rounds are
    held back (``gated``)."""
    server = ReplayedServer(mode["pool"], evicts=mode["evicts"], queue=mode["queue"])
    gate = RoundGate()
    gate.capacity = mode["pool"] if mode["gated"] else 0
    tasks = [asyncio.create_task(_search(server, gate, recording)) for recording in searches]
    while not all(task.done() for task in tasks):
        for _ in range(TURNS):
            await asyncio.sleep(0)
        if not server.step() and not all(task.done() for task in tasks):
            raise RuntimeError("nothing runs and searches are not over")
    for task in tasks:
        task.result()
    drawn_tokens = sum(
        len(draw[1]) for recording in searches for r in recording["rounds"] for draw in r["draws"]
    )
    return mode | {
        "searches": len(searches),
        "again": server.again,
        "bound": least_read_again(server.served, mode["pool"]),
        "drawn": drawn_tokens,
        "held_passes": server.held_passes,
        "passes": server.passes,
    }


def main() -> None:
    """Print a row per line for each mode of the JSON list on stdin (``searches``: how many of the
    recorded ones)."""
    searches = json.loads(Path(sys.argv[1]).read_text())
    with get_context().override_server_args():
        for mode in json.load(sys.stdin):
            row = asyncio.run(replay(searches[: mode.pop("searches")], mode))
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
