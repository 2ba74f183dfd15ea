"""One SGLang server: requests to it, what it says about itself, and its health."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import httpx

from hedgerow_sglang.plugin_protocol import ABLE, Note, custom_params, plugin_counts
from runtime.servers.remote_server import RemoteServer, ServerTimes
from runtime.servers.routing import unsigned
from runtime.servers.server_errors import FULL, KEY_NEEDED, NOT_FOUND, ReplicaLost, WrongServer
from runtime.servers.server_metrics import ServerMetrics
from runtime.sglang.expected_server import PROBE, ExpectedServer, ServerInfo, changes
from runtime.sglang.request_priority import EARLY_PRIORITY
from runtime.sglang.sent_again import SentAgain
from runtime.sglang.sglang_metrics import parse_metrics
from search.engine import EngineDown, EngineError

log = logging.getLogger(__name__)

Json = Mapping[str, Any]


class NotSglang(EngineDown, WrongServer):
    """What answers is not a SGLang server that can be used, but for example a router."""

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; name the servers, not a router")


class Replica(RemoteServer):
    """A SGLang server.

    ``plugged``: our plug-in decides there what is evicted; ``seeds``: it draws by seed;
    ``outputs``: penalties count what was drawn before a request; ``ranks``: without the plug-in,
    KV of requests with a lower priority is evicted first.
    """

    kind = "SGLang"
    stranger = NotSglang

    def __init__(
        self,
        url: str,
        times: ServerTimes,
        *,
        expected: ExpectedServer | None = None,
        trial: tuple[str, Json] | None = None,
        routed: bool = False,
    ) -> None:
        """``expected``: what it is compared with before it is used; ``trial``: a path and a body
        that it must answer before it is used again after a loss; ``routed``: it is a router in
        front of such servers. Connects to nothing yet.
        """
        super().__init__(url, times)
        self.expected = expected
        self.details: Json = {}
        self.plugged = False
        self.seeds = False
        self.ranks = self.chains = self.outputs = False
        self.schedules = False
        self.places = 0
        self.schedulers = 1
        self.under_way = 0
        self._trial = trial
        self.routed = routed
        self.sent_again = SentAgain()

    @property
    def has_grammars(self) -> bool:
        """Whether it was started with a grammar backend, which makes replies follow schemas."""
        return self.details.get("grammar_backend") not in (None, "none")

    def learn(self, info: Json) -> None:
        """Set the attributes from ``/server_info``."""
        self.details = info
        counts = plugin_counts(info) or {}
        able = (bool(counts.get(name)) for name in ABLE)
        self.plugged, self.seeds, self.chains, self.outputs = able
        self.ranks = info.get("radix_eviction_policy") == "priority" and not self.plugged
        self.schedules = bool(info.get("enable_priority_scheduling")) and not (
            info.get("schedule_low_priority_values_first")
            or info.get("disable_priority_preemption")
        )
        states = info.get("internal_states", ())
        self.schedulers = max(1, len(states))
        # One item of a list tells how steps end: each server or scheduler would have to know.
        self.chains &= not self.routed and self.schedulers == 1
        self.places = sum(int(state["effective_max_running_requests_per_dp"]) for state in states)
        self.kv_tokens = int(info.get("max_total_num_tokens") or 0)

    async def generate(self, body: Json, *, early: bool = False) -> Json:
        """The answer of ``/generate``. Raises ReplicaLost, or EngineError saying what is wrong.

        ``early``: no round has asked for it yet, so it has the lowest priority, may be aborted, and
        is not sent again to a full server.
        """
        (body,) = self.schedule([unsigned(body) if self.routed else body])
        if early and self.schedules:
            body = {**body, "priority": EARLY_PRIORITY}
        self.under_way += not early
        try:
            answer = await self._post("/generate", body, () if early else None)
        finally:
            self.under_way -= not early
        finish = answer["meta_info"].get("finish_reason") or {}
        if finish.get("type") == "abort" and not early:
            raise EngineError(f"SGLang ended a request: {finish.get('message', 'aborted')}")
        return answer

    def schedule(self, bodies: Iterable[Json]) -> list[Json]:
        """The bodies, with a default priority if the server schedules by priority."""
        return [{"priority": 0, **body} for body in bodies] if self.schedules else list(bodies)

    @contextlib.asynccontextmanager
    async def open_stream(self, path: str, body: Json) -> AsyncIterator[httpx.Response]:
        """A streamed answer, or the answer of a full server.

        Raises httpx.HTTPError; ReplicaLost and EngineError as ``generate`` does.
        """
        async with self._client.stream("POST", path, json=body) as response:
            if response.is_error and response.status_code not in FULL:
                await response.aread()
                self._refuse(response)
            yield response

    async def tell(self, body: Json) -> None:
        """Send a ``/generate`` request that only carries a note, within the time of a health check.

        A server that takes longer is busy, not lost; failures are logged and ignored.
        """
        try:
            async with asyncio.timeout(self._probe):
                await self.generate(body)
        except (EngineError, TimeoutError) as error:
            log.warning("%s: not heard: %s", self.url, str(error) or type(error).__name__)

    async def release(self, tree: str) -> None:
        """Tell a server with our plug-in that a search is over, so that it frees its KV; each of
        its schedulers, since any of them may have some."""
        if not self.plugged:
            return
        farewell, ranks = _farewell(tree), range(self.schedulers if self.schedulers > 1 else 0)
        bodies = [farewell | {"routed_dp_rank": rank} for rank in ranks] or [farewell]
        await asyncio.gather(*map(self.tell, bodies))

    async def classify(self, body: Json) -> list[Json]:
        """The answers of ``/classify`` for a list. Raises as ``generate`` does."""
        answers: Any = await self._post("/classify", body)
        return answers

    async def abort(self, rid: str) -> None:
        """Abort a request. Does nothing if it is over; logs if the server cannot be reached."""
        try:
            for name in self.sent_again.names(rid):
                body = {"rid": name}
                await self._request("POST", "/abort_request", json=body, timeout=self._probe)
        except httpx.HTTPError as error:
            log.warning("%s: a request could not be stopped: %s", self.url, type(error).__name__)

    async def meet(self) -> None:
        """Learn what the server is, and compare it with ``expected``; what cannot be compared is
        logged the first time.

        Raises EngineDown, and WrongServer if it is not the server needed.
        """
        info = await self.info()
        wrong = tuple(changes(self.details, info))
        if self.expected is not None:
            server_info = ServerInfo(info, await self._model_info())
            if await asyncio.to_thread(self.expected.asks_tokenizer, server_info):
                server_info = replace(server_info, ids=await self._tokenized(PROBE))
            comparison = await asyncio.to_thread(self.expected.compare, server_info)
            wrong += comparison.wrong
            if not self.details and not wrong:
                for note in comparison.notes:
                    log.warning("%s: %s", self.url, note)
                if comparison.unknown:
                    log.info("%s: not compared: %s", self.url, "; ".join(comparison.unknown))
        if wrong:
            raise WrongServer(f"{self.url}: {'; and '.join(wrong)}")
        self.learn(info)

    async def info(self) -> Json:
        """``/server_info``: how the server was started, and its state.

        Raises EngineDown, and NotSglang if the answer is something else.
        """
        response = await self._get("/server_info")
        if self.routed and response.status_code == NOT_FOUND:
            response = await self._get("/get_server_info")
        if response.is_server_error:
            raise self.lose(f"status {response.status_code}")
        if response.status_code in KEY_NEEDED:
            raise NotSglang(
                f"{self.url} wants a key (status {response.status_code} of /server_info); Hedgerow "
                "sends none: start SGLang without --api-key, where only Hedgerow reaches it"
            )
        with contextlib.suppress(ValueError):
            content = response.json() if response.is_success else None
            if isinstance(content, dict) and "internal_states" in content:
                return content
        kind = response.headers.get("content-type", "").partition(";")[0] or "nothing"
        raise NotSglang(
            f"{self.url}: no SGLang server, it answers /server_info with status "
            f"{response.status_code} and {kind}"
        )

    async def _model_info(self) -> Json:
        """``/model_info``, or its older name's answer; empty if the server has neither."""
        for path in ("/model_info", "/get_model_info"):
            response = await self._get(path)
            if response.status_code != NOT_FOUND:
                return self._json(response)
        return {}

    async def _tokenized(self, words: str) -> Sequence[int] | None:
        """The ids of a text by the server's own tokenizer; None if it does not give them."""
        body = {"prompt": words, "add_special_tokens": False}
        try:
            response = await self._request("POST", "/tokenize", json=body, timeout=self._probe)
        except httpx.HTTPError as error:
            raise self.lose(error) from error
        if not response.is_success:
            return None
        ids = self._json(response).get("tokens")
        return ids if isinstance(ids, list) else None

    async def metrics(self) -> ServerMetrics:
        """The server's counts, replaced by our plug-in's where it has some."""
        metrics = parse_metrics(await self._metrics_text())
        counts = plugin_counts(await self.info()) if self.plugged else None
        if counts is None:
            return metrics
        held_tokens, evicted = counts["held_tokens"], counts["evicted_tokens"]
        return replace(
            metrics, held=held_tokens, cached=counts["cached_tokens"] - held_tokens, evicted=evicted
        )

    async def _resend(self, path: str, body: Json) -> httpx.Response:
        """Send a request again, under a new id, or a list under new ids."""
        rid = body.get("rid")
        if rid is None:
            return await self._client.post(path, json=body)
        with self.sent_again.under([rid] if isinstance(rid, str) else rid) as rids:
            fresh_body = {**body, "rid": rids[0] if isinstance(rid, str) else rids}
            return await self._client.post(path, json=fresh_body)

    def lose(self, reason: httpx.HTTPError | str) -> ReplicaLost:
        """``RemoteServer.lose``; also forgets the ids of requests that were sent again."""
        if self.up:
            self.sent_again.clear()
        return super().lose(reason)

    async def works(self) -> bool:
        """Whether it generates, fits, and answers its trial request. Raises HTTPError."""
        response = await self._client.get("/health_generate", timeout=self._probe)
        if not response.is_success or not await self.fits():
            return False
        if self._trial is None:
            return True
        path, body = self._trial
        trial_response = await self._client.post(path, json=body, timeout=self._probe)
        return not trial_response.is_server_error and trial_response.status_code not in FULL


def _farewell(tree: str) -> dict[str, Any]:
    """A request that draws nothing and carries a note that a search is over."""
    note = Note(tree=tree, prompt=1, over=(tree,))
    return {
        "input_ids": [0],
        "sampling_params": {"max_new_tokens": 0, "custom_params": custom_params(note)},
    }
