"""An embeddings server that fails: searches go on, counted, told and logged once."""

from __future__ import annotations

import json
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx2
import pytest

from runtime.embedders.endpoint import Endpoint, EndpointOptions
from search.engine import Trajectory
from tests.search.scripted_engine import ScriptedEngine, direction
from tests.server.conftest import question


class Vectors(ThreadingHTTPServer):
    """An embeddings server that answers ``good`` requests and refuses the others."""

    def __init__(self) -> None:
        self.good = self.asked = 0
        super().__init__(("127.0.0.1", 0), Answering)


class Answering(BaseHTTPRequestHandler):
    """OpenAI's answer, or status 503."""

    server: Vectors

    def do_POST(self) -> None:
        """Vectors that follow from the texts."""
        texts = json.loads(self.rfile.read(int(self.headers["content-length"])))["input"]
        self.server.asked += 1
        well = self.server.asked <= self.server.good
        rows = [{"index": i, "embedding": direction(text)} for i, text in enumerate(texts)]
        body = json.dumps({"data": rows}).encode() if well else b"later"
        self.send_response(200 if well else 503)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Silence."""


@pytest.fixture
def vectors() -> Iterator[Vectors]:
    """One on a free port."""
    serving = Vectors()
    thread = threading.Thread(target=serving.serve_forever, args=(0.01,))
    thread.start()
    yield serving
    serving.shutdown()
    serving.server_close()
    thread.join()


class Asking(ScriptedEngine):
    """A scripted engine whose steps another server embeds, as the real ones do it."""

    endpoint: Endpoint

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """The server's vectors of the last steps' texts."""
        return await self.endpoint.embed_texts([t.texts[-1] for t in trajectories])


@pytest.fixture
async def engine(vectors: Vectors) -> AsyncIterator[Asking]:
    """One that asks it."""
    asking = Asking(lambda b: f"s{b.child}-{b.seed % 97}\n\n")
    url = f"http://127.0.0.1:{vectors.server_port}/v1/embeddings"
    asking.endpoint = Endpoint(EndpointOptions(url, "m"))
    yield asking
    await asking.endpoint.close()


async def ets(http: httpx2.AsyncClient, policy: str = "ets") -> dict:
    """What a search over five levels says of itself."""
    search = {"policy": policy, "width": 8, "seed": 3, "max_depth": 5}
    body = {"model": "sprig", "messages": question(), "search": search}
    answer = await http.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["search"]


@pytest.mark.promise(
    "An embedder's fault costs its search the comparison of steps, not the answer; it is counted, "
    "told and logged once"
)
async def test_a_search_outlives_its_embedder(
    http: httpx2.AsyncClient, vectors: Vectors, caplog: pytest.LogCaptureFixture
) -> None:
    """It fails in the second round, then in the first: what is not compared is REBASE's, the reply
    and the metrics say how often, the log says it once, and a new search asks anew."""
    caplog.set_level(logging.WARNING, "hedgerow")
    vectors.good = 1
    half = (await ets(http))["stats"]
    assert half["embedder_fault"] == "the embeddings endpoint answered with status 503"
    assert half["embedder_fallbacks"] == half["rounds"] - 2
    whole = await ets(http)
    assert whole["stats"]["embedder_fallbacks"] == whole["stats"]["rounds"] - 1
    assert whole["tree_digest"] == (await ets(http, "rebase"))["tree_digest"]
    counted = half["embedder_fallbacks"] + whole["stats"]["embedder_fallbacks"]
    text = (await http.get("/metrics")).text
    assert f'hedgerow_embedder_fallbacks_total{{policy="ets"}} {counted}.0' in text
    told = [r.message for r in caplog.records if "embeddings endpoint" in r.message]
    assert told == [f"{half['embedder_fault']}: such searches go on without comparing steps"]
    vectors.good = 1000
    assert (await ets(http))["stats"]["embedder_fault"] is None


async def test_a_server_that_is_gone_is_no_different(
    http: httpx2.AsyncClient, vectors: Vectors
) -> None:
    """Nobody listens: the address is not told."""
    vectors.shutdown()  # a socket that is still waited at takes one more connection
    vectors.server_close()
    stats = (await ets(http))["stats"]
    assert stats["embedder_fault"] == "the embeddings endpoint does not answer: ConnectError"
    assert stats["embedder_fallbacks"] > 0
