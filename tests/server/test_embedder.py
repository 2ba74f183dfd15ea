"""An embeddings server that fails: searches go on, and it is counted, told and logged once."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator, Sequence

import httpx
import httpx2
import pytest

from runtime.embedders.endpoint import Endpoint, EndpointOptions
from search.engine import Trajectory
from tests.search.scripted_engine import ScriptedEngine, direction
from tests.server.conftest import question


class EndpointEngine(ScriptedEngine):
    """A scripted engine whose steps an embeddings server embeds, as for real engines. The server
    answers ``good`` requests with vectors that follow from the texts, then with status 503."""

    endpoint: Endpoint
    good = requests = 0

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """Return the server's vectors of the last steps' texts."""
        return await self.endpoint.embed_texts([t.texts[-1] for t in trajectories])

    def answer(self, request: httpx.Request) -> httpx.Response:
        """Answer as OpenAI's endpoint does, or with 503."""
        self.requests += 1
        if self.requests > self.good:
            return httpx.Response(503)
        texts = json.loads(request.content)["input"]
        rows = [{"index": i, "embedding": direction(text)} for i, text in enumerate(texts)]
        return httpx.Response(200, json={"data": rows})


@pytest.fixture
async def engine() -> AsyncIterator[EndpointEngine]:
    """An engine with that embeddings server behind it."""
    scripted = EndpointEngine(lambda b: f"s{b.child}-{b.seed % 97}\n\n")
    scripted.endpoint = Endpoint(EndpointOptions("http://vectors.test/v1/embeddings", "m"))
    scripted.endpoint._client._transport = httpx.MockTransport(scripted.answer)
    yield scripted
    await scripted.endpoint.close()


async def ets(http: httpx2.AsyncClient, policy: str = "ets") -> dict:
    """Run a search over five levels and return its ``search`` object."""
    search = {"policy": policy, "width": 8, "seed": 3, "max_depth": 5}
    body = {"model": "sprig", "messages": question(), "search": search}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["search"]


@pytest.mark.promise(
    "An embedder that fails costs its search the comparison of steps, not the answer; it is "
    "counted, reported and logged once."
)
async def test_a_search_outlives_its_embedder(
    http: httpx2.AsyncClient, engine: EndpointEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """The endpoint fails in the second round, then in the first: the tree is REBASE's from there,
    the reply and the metrics count it, the log has one line, a new search asks again."""
    caplog.set_level(logging.WARNING, "hedgerow")
    engine.good = 1
    half = (await ets(http))["stats"]
    assert half["embedder_fault"] == "the embeddings endpoint answered with status 503"
    assert half["embedder_fallbacks"] == half["rounds"] - 2
    whole = await ets(http)
    assert whole["stats"]["embedder_fallbacks"] == whole["stats"]["rounds"] - 1
    assert whole["tree_digest"] == (await ets(http, "rebase"))["tree_digest"]
    fallbacks = half["embedder_fallbacks"] + whole["stats"]["embedder_fallbacks"]
    text = (await http.get("/metrics")).text
    assert f'hedgerow_embedder_fallbacks_total{{policy="ets"}} {fallbacks}.0' in text
    messages = [r.message for r in caplog.records if "embeddings endpoint" in r.message]
    assert messages == [f"{half['embedder_fault']}: such searches go on without comparing steps"]
    engine.good = 1000
    assert (await ets(http))["stats"]["embedder_fault"] is None
