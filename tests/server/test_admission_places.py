"""No place in the queue is lost or shared, whoever comes and leaves when."""

from __future__ import annotations

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from server.admission import Admission, QueueSlot
from server.api_keys import ApiKey
from tests.server.conftest import in_time

ROOM: dict[str, Any] = {"queued": 9, "width": 9, "depth": 9, "prompt_tokens": 9, "tree_tokens": 9}


class House:
    """An admission, the tickets taken from it, and what grows under them."""

    def __init__(self) -> None:
        self.admission = Admission(running=2, queued=3, retry_after=1)
        self.slots: list[QueueSlot] = []
        self.works: dict[QueueSlot, asyncio.Task[None]] = {}
        self.over: set[QueueSlot] = set()
        self.growing = self.letting_go = 0
        self._owners = [
            ApiKey(name="ann", running=1, **ROOM),
            ApiKey(name="bob", running=9, weight=2.0, **ROOM),
        ]

    async def act(self, what: str, which: int) -> None:
        """Do something, to one of the tickets; nothing if it cannot be."""
        if what == "take" and self.admission.open < 5:
            self.slots.append(self.admission.take(self._owners[which % 2]))
        elif what == "step" or not self.slots:
            await self.step()
            return
        slot = self.slots[which % len(self.slots)]
        if what in ("start", "keep") and slot not in self.works.keys() | self.over:
            self.works[slot] = slot.start(self._grow(slot), kept=what == "keep")
        elif what == "cancel":
            slot.cancel()
        elif what == "over":
            slot.close()
            self.over.add(slot)

    async def step(self) -> None:
        """One step of the event loop: what grows has a place."""
        await asyncio.sleep(0)
        assert self.growing <= self.admission.running <= 2
        assert self.admission.running <= self.admission.open <= 5

    async def _grow(self, slot: QueueSlot) -> None:
        await slot.turn(60)
        self.growing += 1
        try:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        except asyncio.CancelledError:
            self.letting_go += 1
            for _ in range(3):
                await asyncio.sleep(0)
            self.letting_go -= 1  # nothing may have cut it short
            raise
        finally:
            self.growing -= 1


ACTS = st.sampled_from(["take", "start", "keep", "step", "cancel", "over"])


@given(st.lists(st.tuples(ACTS, st.integers(0, 9)), min_size=40, max_size=60))
def test_no_place_is_ever_lost_or_shared(acts: list[tuple[str, int]]) -> None:
    """Whatever is taken, started, cancelled and left at whatever step of the event loop: what grows
    has a place as long as it takes to let go, and every place is given back once."""

    @in_time
    async def run() -> None:
        house = House()
        for what, which in acts:
            await house.act(what, which)
        for slot in house.slots:
            slot.close()
        while house.admission.open:
            await house.step()
        assert (house.admission.running, house.growing, house.letting_go) == (0, 0, 0)
        for queue in house.admission.queues.values():
            assert (queue.open, queue.running, len(queue.waiting)) == (0, 0, 0)

    asyncio.run(run())
