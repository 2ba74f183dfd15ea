"""One OpenAI-compatible server: what it serves, its dialect, and requests to it."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from runtime.openai.server_dialect import Dialect
from runtime.servers.remote_server import RemoteServer, ServerTimes
from runtime.servers.server_errors import KEY_NEEDED, NOT_FOUND, WrongServer
from runtime.servers.server_metrics import ServerMetrics, series_sums

log = logging.getLogger(__name__)

Json = Mapping[str, Any]
MODELS = "/v1/models"
COMPLETIONS = "/v1/completions"
CONFIG = "vllm:cache_config"
CUT_SHORT = frozenset({"abort", "error"})
"""vLLM's ``finish_reason`` where the server itself has given a request up."""


class CompletionServer(RemoteServer):
    """A server, asked under ``/v1`` of its URL.

    ``model``: its name there; ``context``: most tokens, 0 if the server does not say; ``block``:
    tokens of a cache block; ``vllm``: whether it is vLLM; ``dialect``: of a policy's server.
    ``try_out`` finds out what a server can do when it is met, and may raise WrongServer.
    """

    def __init__(
        self,
        url: str,
        times: ServerTimes,
        name: str | None,
        headers: dict[str, str],
        try_out: Callable[[CompletionServer], Awaitable[None]],
        *,
        setting: str,
    ) -> None:
        """``name``: of the model there, None for the only one; ``setting``: the setting that holds
        it, for errors; ``headers``: of every request."""
        super().__init__(url.rstrip("/").removesuffix("/v1"), times, headers)
        self.model = name or ""
        self.context = 0
        self.block = 1
        self.vllm = False
        self.dialect: Dialect | None = None
        self._name = name
        self._setting = setting
        self._try_out = try_out

    @property
    def salts(self) -> bool:
        """Whether it is sent a cache salt: vLLM, and what takes more than OpenAI's fields."""
        return self.vllm or (self.dialect is not None and self.dialect.extras)

    async def ask(self, path: str, body: Json) -> Json:
        """The answer to a request for the model. Raises ReplicaLost, and EngineError saying what is
        wrong."""
        answer = await self._post(path, {"model": self.model, **body})
        if path != COMPLETIONS:
            return answer
        if not (isinstance(answer, dict) and answer.get("choices")):
            raise self.lose("status 200, no choices")
        for choice in answer["choices"]:
            if (end := choice.get("finish_reason")) in CUT_SHORT:
                raise self.lose(f"status 200, finish_reason {end!r}")
        return answer

    async def meet(self) -> None:
        """Learn what the server serves and what its answers hold.

        Raises EngineDown, and WrongServer if it is not the server that is needed.
        """
        self._learn(await self._models())
        answer = await self._get("/health")
        self.health = MODELS if answer.status_code == NOT_FOUND else "/health"
        await self._learn_cache()
        await self._try_out(self)

    async def works(self) -> bool:
        """Whether it answers and is still the right server. Raises httpx.HTTPError."""
        response = await self._client.get(self.health, timeout=self._probe)
        return response.is_success and await self.fits()

    async def metrics(self) -> ServerMetrics:
        """vLLM's metrics; all zero for other servers."""
        return parse_metrics(await self._metrics_text(), self.kv_tokens)

    def _learn(self, models: list[Json]) -> None:
        names = [str(model.get("id")) for model in models]
        if self._name is None and len(names) != 1:
            raise WrongServer(
                f"{self.url} serves {', '.join(names) or 'nothing'}: name one by {self._setting}"
            )
        self.model = self._name or names[0]
        if self.model not in names:
            raise WrongServer(
                f"{self.url} serves {', '.join(names) or 'nothing'}, not {self._setting} = "
                f"{self.model!r}"
            )
        self.context = int(models[names.index(self.model)].get("max_model_len") or 0)

    async def _models(self) -> list[Json]:
        response = await self._get(MODELS)
        if response.status_code in KEY_NEEDED:
            raise WrongServer(
                f"{self.url} wants another key (status {response.status_code} of {MODELS})"
            )
        if response.is_server_error:
            raise self.lose(f"status {response.status_code}")
        try:
            models = response.json()["data"]
            return [dict(model) for model in models]
        except (ValueError, LookupError, TypeError):
            kind = response.headers.get("content-type", "").partition(";")[0] or "nothing"
            raise WrongServer(
                f"{self.url}: no OpenAI-compatible server, it answers {MODELS} with status "
                f"{response.status_code} and {kind}"
            ) from None

    async def _learn_cache(self) -> None:
        """Read the KV cache's size and block size from vLLM's metrics; others state none, or have
        something else there."""
        try:
            families = list(text_string_to_metric_families(await self._metrics_text()))
        except ValueError as error:
            log.info("%s: /metrics is not Prometheus's: %s", self.url, error)
            return
        for family in families:
            if family.name.startswith(CONFIG):
                self.vllm = True
                labels = family.samples[0].labels
                self.block = _number(labels.get("block_size")) or 1
                self.kv_tokens = self.block * _number(labels.get("num_gpu_blocks"))


def parse_metrics(text: str, capacity: int) -> ServerMetrics:
    """Parse vLLM's ``/metrics``; ``capacity``: of the server's KV cache, in tokens."""
    sums = series_sums(text)
    return ServerMetrics(
        held=int(sums["vllm:kv_cache_usage_perc"] * capacity),
        running=int(sums["vllm:num_requests_running"]),
        waiting=int(sums["vllm:num_requests_waiting"]),
    )


def _number(label: str | None) -> int:
    return int(label) if label and label.isdecimal() else 0
