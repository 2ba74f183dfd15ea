"""Places in the queue are neither lost nor shared, whenever clients come and leave."""

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
    """An admission, the slots taken from it, and the work that runs in them."""

    def __init__(self) -> None:
        self.admission = Admission(running=2, queued=3, retry_after=1)
        self.slots: list[QueueSlot] = []
        self.works: dict[QueueSlot, asyncio.Task[None]] = {}
        self.closed: set[QueueSlot] = set()
        self.growing = self.letting_go = 0
        self._owners = [
            ApiKey(name="ann", running=1, **ROOM),
            ApiKey(name="bob", running=9, weight=2.0, **ROOM),
        ]

    async def act(self, action: str, index: int) -> None:
        """Do an action to one of the slots; do nothing if it does not apply."""
        if action == "take" and self.admission.open < 5:
            self.slots.append(self.admission.take(self._owners[index % 2]))
        elif action == "step" or not self.slots:
            await self.step()
            return
        slot = self.slots[index % len(self.slots)]
        if action in ("start", "keep") and slot not in self.works.keys() | self.closed:
            self.works[slot] = slot.start(self._grow(slot), outlives_request=action == "keep")
        elif action == "cancel":
            slot.cancel()
        elif action == "over":
            slot.close()
            self.closed.add(slot)

    async def step(self) -> None:
        """Run one step of the event loop; all running work has a place."""
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
            self.letting_go -= 1  # not reached if it was cut short
            raise
        finally:
            self.growing -= 1


ACTS = st.sampled_from(["take", "start", "keep", "step", "cancel", "over"])


@given(st.lists(st.tuples(ACTS, st.integers(0, 9)), min_size=40, max_size=60))
def test_no_place_is_ever_lost_or_shared(acts: list[tuple[str, int]]) -> None:
    """Slots are taken, started, cancelled and closed at any step of the event loop: work has a
    place until it has cleaned up, and every place is given back once."""

    @in_time
    async def run() -> None:
        house = House()
        for action, index in acts:
            await house.act(action, index)
        for slot in house.slots:
            slot.close()
        while house.admission.open:
            await house.step()
        assert (house.admission.running, house.growing, house.letting_go) == (0, 0, 0)
        for queue in house.admission.queues.values():
            assert (queue.open, queue.running, len(queue.waiting)) == (0, 0, 0)

    asyncio.run(run())
