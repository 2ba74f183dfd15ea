"""Counting the requests that each round sends."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import httpx

from loadtest.searches import REBASE_8, Method, grow_all, unlike_items
from loadtest.sglang_pools import CountedRounds
from runtime.servers.remote_server import ServerTimes
from runtime.sglang.replica import Replica
from search.engine import Branch, Sampling, Step, Trajectory
from tests.search.scripted_engine import ScriptedEngine


class Sending(ScriptedEngine):
    """Sends two requests for a round's draws, one for its scores, and one health request."""

    def __init__(self, policy: Replica, reward: Replica) -> None:
        super().__init__()
        self.requests = 0
        self._policy, self._reward = policy, reward

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Send the requests and draw as scripted."""
        self.requests += 2
        for path in ("/generate", "/server_info", "/generate"):
            await self._policy._client.post(path)
            await asyncio.sleep(0)
        return await super().expand(tree, branches, sampling)

    async def score(
        self, tree: str, prompt: tuple[int, ...], question: str, trajectories: Sequence[Trajectory]
    ) -> list[float]:
        """Send the request and score as scripted."""
        self.requests += 1
        await self._reward._client.post("/classify")
        return await super().score(tree, prompt, question, trajectories)


async def test_requests_are_counted_by_round_and_server() -> None:
    """Counts are right with several searches at once; health requests do not count, nor do requests
    outside of a round."""
    transport = httpx.MockTransport(lambda _: httpx.Response(200))
    servers = [Replica(f"http://{name}", ServerTimes(1, 1, 1, 9)) for name in ("policy", "reward")]
    for server in servers:
        await server.close()
        server._client = httpx.AsyncClient(base_url=server.url, transport=transport)
    engine = Sending(*servers)
    with CountedRounds(engine).listening() as rounds:
        await grow_all(rounds, unlike_items("game24", 3), Method("one", REBASE_8), 3)
        await servers[0]._client.post("/generate")
    await servers[0]._client.post("/generate")
    assert rounds.most == 2
    assert rounds.total == engine.requests
    for server in servers:
        await server.close()
