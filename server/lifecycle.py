"""How a server starts, stays up and ends: logging with request ids, a watchdog that restarts its
engines, a graceful shutdown."""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import signal
import socket
import time
from contextlib import AsyncExitStack, ExitStack
from dataclasses import dataclass
from importlib import import_module
from types import FrameType
from typing import TYPE_CHECKING, Literal

import uvicorn
from prometheus_client import Counter

from search.engine import EngineDown, EngineError
from server.api_errors import request_id
from server.api_keys import ApiKeys
from server.app import create_app
from server.assemble import Restartable, further_models, running
from server.connections import (
    Connections,
    accepted_at_once,
    guarded,
    raised_handle_limit,
    within_handles,
)
from server.service import Service, add_model, create_service, own_version
from server.settings import Settings, SettingsError
from server.tree_log import TreeLog

if TYPE_CHECKING:
    from server.tracing import Tracing

log = logging.getLogger("hedgerow")

KEEP_ALIVE_SECONDS = 75
"""For idle connections. OpenAI's client drops them after 5 s; with uvicorn's default, 5 s too, a
request sent at that moment would be lost."""
LONGEST_PAUSE = 60.0
"""The most seconds between two restarts of an engine that does not start."""
CLOSE_SECONDS = 2
"""The seconds that connections have at shutdown to close after their answers are sent."""


def listen(host: str, port: int) -> socket.socket:
    """Bind a socket. Raises SettingsError if the address is not available.

    It names TCP as its protocol: else asyncio leaves on Nagle's algorithm (40 ms a response).
    """
    try:
        infos = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, proto, _, address = infos[0]
        with ExitStack() as stack:
            listener = stack.enter_context(socket.socket(family, kind, proto))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(address)
            stack.pop_all()
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def traces_of(settings: Settings) -> Tracing | None:
    """The tracer, None without an OTLP endpoint. Raises SettingsError if its package is missing."""
    if settings.otlp_endpoint is None:
        return None
    try:
        traces = import_module("server.tracing")
    except ModuleNotFoundError as error:
        message = f"HEDGEROW_OTLP_ENDPOINT needs {error.name}: install hedgerow[traces]"
        raise SettingsError(message) from None
    exporter = traces.by_otlp(settings.otlp_endpoint)
    return traces.Tracing(exporter, settings.model, own_version())


async def serve(settings: Settings, trees: TreeLog) -> None:
    """Serve until SIGTERM or SIGINT; running requests then have ``drain_seconds`` to finish."""
    start_logging(settings.log_level, settings.log_format)
    handles = raised_handle_limit()
    settings = within_handles(settings, handles)
    config = _config(settings, handles)
    ApiKeys.load(settings)  # report errors in them before models are loaded
    listener = listen(settings.host, settings.port)
    if settings.answers != "text":
        await asyncio.to_thread(import_module, "server.maths")  # before the first request
    traces = traces_of(settings)
    further = further_models(settings)
    async with AsyncExitStack() as engines:
        first, *others = [
            await engines.enter_async_context(running(s)) for s in (settings, *further)
        ]
        service = create_service(settings, first.engine, first.text, trees=trees, traces=traces)
        for model_settings, parts in zip(further, others, strict=True):
            add_model(service, model_settings, parts.engine, parts.text)
        restarts = service.metrics.engine_restarts
        watch = EngineWatch(settings.watchdog_seconds, settings.restart_attempts, restarts)
        watchdogs = [
            asyncio.create_task(watch.over(engine, model_settings.model))
            for model_settings, parts in zip((settings, *further), (first, *others), strict=True)
            for engine in parts.restartable
        ]

        async def end() -> None:
            for watchdog in watchdogs:
                watchdog.cancel()
            for parts in (first, *others):
                await parts.engine.close()
            if traces is not None:
                await traces.close()

        config.app = create_app(service, end)
        host, port = listener.getsockname()[:2]
        url_host = f"[{host}]" if ":" in host else host
        gc.collect()
        gc.freeze()  # permanent objects are not scanned again
        for model in service.models:
            if threads := model.runner.engine.capabilities.threads:
                log.info("%s: threads of the engine: at most %d", model.settings.model, threads)
        listener.listen(config.backlog)  # a reader of the next line may connect at once
        log.info("ready: serving %s on http://%s:%s", settings.model, url_host, port)
        for model_settings in further:
            log.info("serving %s too", model_settings.model)
        await GracefulServer(config, service).serve(sockets=[listener])


def _config(settings: Settings, handles: int) -> uvicorn.Config:
    return uvicorn.Config(
        "",
        log_config=None,
        log_level="warning",
        access_log=False,
        timeout_graceful_shutdown=CLOSE_SECONDS,
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
        http=guarded(Connections(settings.max_connections), settings.head_seconds),
        ws="none",
        backlog=accepted_at_once(settings.max_connections, handles),
        proxy_headers=bool(settings.trusted_proxies),
        forwarded_allow_ips=list(settings.trusted_proxies),
    )


class GracefulServer(uvicorn.Server):
    """After the first signal ``/ready`` fails and new work is refused, while the socket stays open
    and running requests finish; those that run after ``drain_seconds`` are ended with an error.
    """

    def __init__(self, config: uvicorn.Config, service: Service) -> None:
        super().__init__(config)
        self._service = service
        self._until: float | None = None

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Start draining at the first SIGTERM or SIGINT; end the process at the second."""
        if self._until is not None:
            signal.signal(sig, signal.SIG_DFL)  # the engine's process ends with the pipe to it
            signal.raise_signal(sig)
        self._until = time.monotonic() + self._service.settings.drain_seconds
        self._service.draining.set()

    async def on_tick(self, counter: int) -> bool:
        """Return whether to exit; uvicorn calls this ten times a second."""
        if await super().on_tick(counter):
            return True
        if self._until is None:
            return False
        if counter % 10 == 0:
            log.info("draining: %d requests under way", self._under_way)
        if self._under_way and time.monotonic() < self._until:
            return False
        await self._service.close()
        return True

    @property
    def _under_way(self) -> int:
        """The number of requests being answered and of searches that run without a request."""
        return max(len(self.server_state.tasks), self._service.admission.open)


@dataclass(frozen=True, slots=True)
class EngineWatch:
    """Checks every ``seconds`` that an engine, or one of its servers, is alive.

    An engine that has ended is restarted. If restarts fail, at most ``attempts`` are made in a row,
    each after twice the pause before, up to LONGEST_PAUSE.
    """

    seconds: float
    attempts: int
    restarts: Counter

    async def over(self, engine: Restartable, model: str) -> None:
        """Watch until cancelled or out of attempts. During a restart searches on SGLang wait; those
        of the embedded engine have failed with EngineDown, with a retry-after header."""
        failures = 0
        while failures < self.attempts:
            await asyncio.sleep(min(LONGEST_PAUSE, self.seconds * 2**failures))
            try:
                await engine.health()
            except EngineDown as down:
                log.error("%s: %s: restarting the engine", model, down)
                self.restarts.labels(model).inc()
                try:
                    await engine.restart()
                except (EngineError, ValueError, OSError) as error:
                    failures += 1
                    log.error("%s: the engine does not start: %s", model, error)
                else:
                    failures = 0
                    log.info("%s: the engine is back", model)
        log.critical("%s: given up after %d restarts that failed", model, failures)


LOG_TEXT = "%(asctime)s %(levelname)s %(name)s%(request)s: %(message)s"


class TextLines(logging.Formatter):
    """Formats log records as text for people."""

    def __init__(self) -> None:
        super().__init__(LOG_TEXT)

    def format(self, record: logging.LogRecord) -> str:
        """The line, with the request's id if there is one."""
        name = request_id.get()
        record.request = f" [{name}]" if name else ""
        return super().format(record)


class JsonLines(logging.Formatter):
    """Formats a record as a JSON object: time (UTC), level, logger, message and extra fields."""

    def format(self, record: logging.LogRecord) -> str:
        """The JSON line; the record's ``fields`` become keys of the object."""
        when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        line = {
            "time": f"{when}.{int(record.msecs):03d}Z",
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
            "request_id": request_id.get(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps({key: value for key, value in line.items() if value is not None})


def start_logging(level: str, form: Literal["text", "json"]) -> None:
    """Log everything from ``level`` on to stderr in the given form.

    ``httpx`` logs warnings only, except at ``debug``: it logs a line for every request to an
    engine's servers, and a search makes hundreds.
    """
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if form == "json" else TextLines())
    logging.basicConfig(level=level.upper(), handlers=[handler])
    if level != "debug":
        logging.getLogger("httpx").setLevel(logging.WARNING)
