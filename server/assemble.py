"""The one place that puts the parts together: models, engine, text, app."""

from __future__ import annotations

import asyncio
import gc
import logging
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

import uvicorn

from kvpolicy.roofline import SplitLoad
from runtime.embedded.engine import EmbeddedEngine, EngineOptions
from runtime.embedded.model.config import ModelConfig, UnsupportedModel, middle_layer
from runtime.flops import Flops, no_flops
from runtime.profile import PROFILES
from runtime.reward_format import reward_format
from runtime.text import Text
from search.engine import Engine
from server.api_keys import ApiKeys
from server.app import add_model, create_app, create_service
from server.connections import (
    Connections,
    accepted_at_once,
    raised_handle_limit,
    within_handles,
)
from server.further_models import further_models
from server.guarded_protocol import guarded
from server.lifecycle import GracefulServer, Restartable, watch_engine
from server.logs import start_logging
from server.service import ChatText, Service, own_version
from server.settings import Settings, SettingsError
from server.sglang_setup import endpoint_options, sglang_engine
from server.tree_log import TreeLog

if TYPE_CHECKING:
    from server.tracing import Tracing

log = logging.getLogger("hedgerow")

KEEP_ALIVE_SECONDS = 75
"""For idle connections. OpenAI's client drops them after 5 s, as uvicorn would by default: whoever
sends on one just then loses its request."""
CLOSE_SECONDS = 2
"""For connections to close once their answers are sent."""


@dataclass(frozen=True)
class RunningModel:
    """A running engine and what belongs to its models.

    ``flops``: what forward passes of the policy, of the reward model and for embedding cost.
    ``restartable``: the engine's process, where it has one.
    """

    engine: Engine
    text: ChatText
    delimiter: str
    flops: tuple[Flops, ...] = (no_flops, no_flops)
    restartable: Restartable | None = None

    def service(
        self, settings: Settings, trees: TreeLog | None = None, traces: Tracing | None = None
    ) -> Service:
        """A service over these parts."""
        return create_service(settings, self.engine, self.text, self.delimiter, trees, traces)


@asynccontextmanager
async def running(settings: Settings, *, attention: bool = False) -> AsyncIterator[RunningModel]:
    """Start the engine that the settings ask for, and stop it afterwards.

    ``attention``: the embedded engine tells what steps attend to with them. Raises
    SettingsError naming the key for a checkpoint, format or profile that cannot be used.
    """
    if settings.profile not in PROFILES:
        known = ", ".join(PROFILES)
        raise SettingsError(f"HEDGEROW_PROFILE = {settings.profile!r}: known are {known}")
    for name in ("policy_model", "reward_model"):
        path = getattr(settings, name)
        if path is not None and not (path / "config.json").is_file():
            key = f"HEDGEROW_{name.upper()}"
            raise SettingsError(f"{key} = '{path}': must be a folder with a config.json")
    for embedder, name in (("encoder", "encoder"), ("endpoint", "embeddings_url")):
        if settings.embedder == embedder and getattr(settings, name) is None:
            key = f"HEDGEROW_{name.upper()}"
            raise SettingsError(f"{key} is not set: HEDGEROW_EMBEDDER = {embedder!r} needs it")
    try:
        text = Text(settings.policy_model)
        await asyncio.to_thread(lambda: text.tokenizer)
        flops = model_flops(settings)
        started = starting(settings, attention=attention)
        engine, restartable = await started.__aenter__()
    except (ValueError, OSError) as error:
        raise SettingsError(str(error)) from error
    try:
        yield RunningModel(engine, text, PROFILES[settings.profile].delimiter, flops, restartable)
    finally:
        await started.__aexit__(None, None, None)


@asynccontextmanager
async def starting(
    settings: Settings, *, attention: bool = False
) -> AsyncIterator[tuple[Engine, Restartable | None]]:
    """The engine by its name, closed afterwards, and what can be started again of it."""
    if settings.engine == "sglang":
        async with sglang_engine(settings) as found:
            yield found
        return
    engine = await EmbeddedEngine.start(replace(engine_options(settings), attention=attention))
    try:
        yield engine, engine
    finally:
        await engine.close()


def engine_options(settings: Settings) -> EngineOptions:
    """The embedded engine's options; without a reward model that it needs, the format is ``none``.

    Raises ValueError for a format that there is not.
    """
    needed = reward_format(settings.reward_format).needs_model
    prm = settings.reward_model if needed else None
    if needed and prm is None:
        log.info("no reward model: rewards are the policy's mean log-probabilities")
    own = {field.name for field in fields(EngineOptions)} & Settings.model_fields.keys()
    values: dict[str, Any] = {
        name: getattr(settings, name) for name in own - {"reward_format", "kv_load"}
    }
    return EngineOptions(
        **{name: _text(value) for name, value in values.items()},
        policy=str(settings.policy_model),
        prm=str(prm) if prm else None,
        reward_format=settings.reward_format if prm or not needed else "none",
        kv_load=SplitLoad(*settings.kv_load),
        version=own_version(),
        endpoint=endpoint_options(settings),
    )


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def model_flops(settings: Settings) -> tuple[Flops, Flops, Flops]:
    """What forward passes of the policy, of the reward model and for embedding cost."""
    if settings.engine == "sglang":
        return _known_flops(settings.policy_model), _known_flops(settings.reward_model), no_flops
    policy = ModelConfig.from_checkpoint(settings.policy_model)
    prm, embedding = no_flops, no_flops
    if settings.reward_model is not None and reward_format(settings.reward_format).needs_model:
        prm = ModelConfig.from_checkpoint(settings.reward_model).flops
    if settings.embedder == "hidden":
        layer = settings.embedder_layer or middle_layer(policy.layers)
        embedding = replace(policy, layers=layer).flops
    return policy.flops, prm, embedding


def _known_flops(checkpoint: Path | None) -> Flops:
    """Of a model that SGLang runs, whose shape may be none that is known here."""
    try:
        return no_flops if checkpoint is None else ModelConfig.from_checkpoint(checkpoint).flops
    except UnsupportedModel:
        return no_flops


def listen(host: str, port: int) -> socket.socket:
    """A bound socket. Raises SettingsError if the address cannot be had.

    It is TCP by name: asyncio turns Nagle's algorithm off (40 ms a response) for such ones only.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, proto=socket.IPPROTO_TCP)
        family, kind, proto, _, address = found[0]
        listener = socket.socket(family, kind, proto)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        raise SettingsError(f"cannot listen on {host}:{port}: {error.strerror}") from error
    return listener


def traces_of(settings: Settings) -> Tracing | None:
    """What makes spans, where they have somewhere to go. Raises SettingsError."""
    if settings.otlp_endpoint is None:
        return None
    try:
        traces = import_module("server.tracing")
    except ModuleNotFoundError as error:
        wanted = f"HEDGEROW_OTLP_ENDPOINT needs {error.name}: install hedgerow[traces]"
        raise SettingsError(wanted) from None
    sent = traces.by_otlp(settings.otlp_endpoint)
    return traces.Tracing(sent, settings.model, own_version())


async def serve(settings: Settings, trees: TreeLog) -> None:
    """Serve until a signal; running requests then have ``drain_seconds`` to finish."""
    start_logging(settings.log_level, settings.log_format)
    handles = raised_handle_limit()
    settings = within_handles(settings, handles)
    config = uvicorn.Config(
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
    ApiKeys.load(settings)  # what is wrong with them is said before models are loaded
    listener = listen(settings.host, settings.port)
    if settings.answers != "text":
        await asyncio.to_thread(import_module, "server.maths")  # not in the first request's time
    traces = traces_of(settings)
    further = further_models(settings)
    async with AsyncExitStack() as engines:
        grown = [await engines.enter_async_context(running(s)) for s in (settings, *further)]
        service = grown[0].service(settings, trees, traces)
        for own, parts in zip(further, grown[1:], strict=True):
            add_model(service, own, parts.engine, parts.text, parts.delimiter)
        watchdogs = [
            asyncio.create_task(_keep(parts, served))
            for parts, served in zip(grown, service.models, strict=True)
        ]

        async def end() -> None:
            for watchdog, parts in zip(watchdogs, grown, strict=True):
                watchdog.cancel()
                await parts.engine.close()
            if traces is not None:
                await traces.close()

        config.app = create_app(service, end)
        host, port = listener.getsockname()[:2]
        shown = f"[{host}]" if ":" in host else host
        gc.collect()
        gc.freeze()  # what stays for good is not looked through again and again
        for own, parts in zip((settings, *further), grown, strict=True):
            if threads := parts.engine.capabilities.threads:
                log.info("%s: threads of the engine: at most %d", own.model, threads)
        listener.listen(config.backlog)  # who reads the next line may connect at once
        log.info("ready: serving %s on http://%s:%s", settings.model, shown, port)
        for own in further:
            log.info("serving %s too", own.model)
        await GracefulServer(config, service).serve(sockets=[listener])


async def _keep(parts: RunningModel, served: Service) -> None:
    if parts.restartable is not None:
        settings = served.settings
        restarts = served.metrics.engine_restarts.labels(settings.model)
        await watch_engine(parts.restartable, settings.watchdog_seconds, restarts, settings.model)
