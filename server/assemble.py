"""Builds a server's models from its settings: engines, tokenizers, verifiers and their costs."""

from __future__ import annotations

import asyncio
import logging
import shlex
import tomllib
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hedgerow_sglang.plugin_protocol import BACKENDS
from kvpolicy.roofline import SplitLoad
from runtime.accounting import Flops, no_flops
from runtime.checkpoint import check_weights
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.model.config import ModelConfig, middle_layer
from runtime.embedded.options import EngineOptions
from runtime.embedders.endpoint import EndpointOptions
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import OpenaiOptions, ServedModel
from runtime.reward_format import reward_format
from runtime.servers.server_options import ServerOptions
from runtime.sglang.launched_server import LaunchedServer, LaunchedServers, LaunchOptions
from runtime.sglang.sglang_engine import SglangEngine, flops_of
from runtime.sglang.sglang_options import SglangOptions
from runtime.text import Text
from runtime.verified_engine import VerifiedEngine, start_verifier
from runtime.verifiers.verifier import Verifier, VerifierOptions
from search.engine import Engine
from server.gpus import local_gpu
from server.launch_memory import launch_shares
from server.machine import launch_device
from server.model_settings import AUTO
from server.reward_settings import known_format, verified_alone
from server.service import own_version
from server.setting_types import EMBEDDED, LAUNCHED, declared, headers_of
from server.settings import (
    PREFIX,
    ModelSettings,
    Settings,
    SettingsError,
    settings_by_name,
    variable,
)

log = logging.getLogger("hedgerow")

FIELDS = [
    name
    for name, field in ModelSettings.model_fields.items()
    if EMBEDDED in declared(field)["on"] and name not in ("engine", "model", "models_file")
]
"""The settings that a table of ``models_file`` may set; all others are the server's."""


Restartable = EmbeddedEngine | LaunchedServer
"""Engines and servers that the watchdog restarts when they end."""


@dataclass(frozen=True)
class RunningModel:
    """A running engine and what belongs to its models.

    ``flops``: the cost of forward passes of the policy, the reward model and for embeddings.
    ``restartable``: the engine's process, or the servers that the engine has launched.
    """

    engine: Engine
    text: Text
    flops: tuple[Flops, ...] = (no_flops, no_flops)
    restartable: Sequence[Restartable] = ()


@asynccontextmanager
async def running(settings: Settings, *, attention: bool = False) -> AsyncIterator[RunningModel]:
    """Start the engine that the settings ask for, and stop it afterwards.

    ``attention``: have the embedded engine return with each step what it attends to. Raises
    SettingsError naming the key for a checkpoint, format or profile that cannot be used.
    """
    for name in ("policy_model", "reward_model"):
        path = getattr(settings, name)
        if path is not None and not (path / "config.json").is_file():
            key = f"HEDGEROW_{name.upper()}"
            raise SettingsError(f"{key} = '{path}': must be a folder with a config.json")
    known_format(settings)
    for embedder, name in (("encoder", "encoder"), ("endpoint", "embeddings_url")):
        if settings.embedder == embedder and getattr(settings, name) is None:
            key = f"HEDGEROW_{name.upper()}"
            raise SettingsError(f"{key} is not set: HEDGEROW_EMBEDDER = {embedder!r} needs it")
    async with AsyncExitStack() as stack:
        try:
            text = Text(settings.policy_model)
            await asyncio.to_thread(lambda: text.tokenizer)
            flops = model_flops(settings)
            verifier = await _verifier(settings, stack)
            if settings.engine == "sglang":
                engine, restartable = await _sglang_engine(settings, stack)
            elif settings.engine == "openai":
                engine, restartable = await OpenaiEngine.start(openai_options(settings)), ()
                stack.push_async_callback(engine.close)
            else:
                options = replace(engine_options(settings), attention=attention)
                engine = await EmbeddedEngine.start(options)
                restartable = (engine,)
                stack.push_async_callback(engine.close)
        except (ValueError, OSError) as error:
            raise SettingsError(str(error)) from error
        if verifier is not None:
            engine = VerifiedEngine(engine, verifier, alone=verified_alone(settings))
        yield RunningModel(engine, text, flops, restartable)


def engine_options(settings: Settings) -> EngineOptions:
    """The embedded engine's options; the format is ``none`` if its reward model is missing.

    Raises ValueError for an unknown format.
    """
    form = _format(settings)
    prm = settings.reward_model if reward_format(form).needs_model else None
    names = {field.name for field in fields(EngineOptions)} & Settings.model_fields.keys()
    values: dict[str, Any] = {
        name: getattr(settings, name) for name in names - {"reward_format", "kv_load"}
    }
    return EngineOptions(
        **{name: _text(value) for name, value in values.items()},
        policy=str(settings.policy_model),
        prm=str(prm) if prm else None,
        reward_format=form,
        kv_load=SplitLoad(*settings.kv_load),
        version=own_version(),
        endpoint=endpoint_options(settings),
    )


def _text(value: Any) -> Any:
    return str(value) if isinstance(value, Path) else value


def model_flops(settings: Settings) -> tuple[Flops, Flops, Flops]:
    """The cost of forward passes of the policy, of the reward model and for embeddings."""
    if settings.engine != "embedded":
        prm = settings.reward_model
        return flops_of(settings.policy_model), flops_of(prm) if prm else no_flops, no_flops
    policy = ModelConfig.from_checkpoint(settings.policy_model)
    prm, embedding = no_flops, no_flops
    if settings.reward_model is not None and reward_format(known_format(settings)).needs_model:
        prm = ModelConfig.from_checkpoint(settings.reward_model).flops
    if settings.embedder == "hidden":
        layer = settings.embedder_layer or middle_layer(policy.layers)
        embedding = replace(policy, layers=layer).flops
    return policy.flops, prm, embedding


def verifier_options(settings: Settings) -> VerifierOptions | None:
    """The verifier's options, None if the settings name no verifier."""
    if settings.verifier is None:
        return None
    key = settings.verifier_key
    return VerifierOptions(
        settings.verifier,
        settings.verifier_seconds,
        settings.verifier_processes,
        settings.verifier_pure,
        None if key is None else key.get_secret_value(),
    )


async def check_verifier(settings: Settings) -> None:
    """Import the verifier's function in a process of its own. Raises ValueError if that fails; a
    verifier that is a URL is not called."""
    if (options := verifier_options(settings)) is not None:
        await (await start_verifier(options)).close()


async def _verifier(settings: Settings, stack: AsyncExitStack) -> Verifier | None:
    """Start the verifier, which ``stack`` closes; None if there is none. Raises ValueError."""
    if (options := verifier_options(settings)) is None:
        return None
    verifier = await start_verifier(options)
    stack.push_async_callback(verifier.close)
    log.info(
        "rewards are %s verifier's, which %s",
        "the" if verified_alone(settings) else "the reward model's times the",
        "says that it is pure" if verifier.pure else "is outside the promise of equal trees",
    )
    return verifier


async def _sglang_engine(
    settings: Settings, stack: AsyncExitStack
) -> tuple[SglangEngine, Sequence[LaunchedServer]]:
    """Start the engine, and its servers if they are to be launched; ``stack`` closes both.

    Raises SettingsError naming the key that is wrong, EngineDown for a server that is unreachable.
    """
    servers, urls = [], ()
    if settings.engine_way == LAUNCHED:
        options = server_options(settings)
        for server in options:
            check_weights(Path(server.model))
        launcher = LaunchedServers(options, settings.start_seconds)
        servers = launcher.servers
        policy, *reward = (server.url for server in servers)
        urls = ((policy,), tuple(reward))
        await launcher.start()
        stack.push_async_callback(launcher.close)
    engine = await SglangEngine.start(sglang_options(settings, *urls))
    stack.push_async_callback(engine.close)
    return engine, servers


def sglang_options(
    settings: Settings,
    policy_urls: tuple[str, ...] | None = None,
    reward_urls: tuple[str, ...] | None = None,
) -> SglangOptions:
    """The engine's options; the URLs of launched servers replace those of the settings.

    Raises SettingsError or ValueError naming what is wrong.
    """
    shared = _shared_server_options(settings)
    needs_model = reward_format(shared["reward_format"]).needs_model
    return SglangOptions(
        **shared,
        policy=settings.policy_model,
        policy_urls=settings.policy_urls if policy_urls is None else policy_urls,
        prm=settings.reward_model if needs_model else None,
        reward_urls=settings.reward_urls if reward_urls is None else reward_urls,
        speculate=settings.speculate,
        lookahead=settings.lookahead,
    )


def openai_options(settings: Settings) -> OpenaiOptions:
    """The engine's options. Raises SettingsError or ValueError naming what is wrong."""
    shared = _shared_server_options(settings)
    form = reward_format(shared["reward_format"])
    needs_server = form.needs_model or form.by_score_route
    return OpenaiOptions(
        **shared,
        policy=_served_model(settings, "policy"),
        reward=_served_model(settings, "reward") if needs_server else None,
    )


def _served_model(settings: Settings, role: Literal["policy", "reward"]) -> ServedModel:
    key, headers = getattr(settings, f"{role}_key"), settings.server_headers
    return ServedModel(
        getattr(settings, f"{role}_model") or settings.policy_model,
        getattr(settings, f"{role}_urls"),
        getattr(settings, f"{role}_name"),
        None if key is None else key.get_secret_value(),
        {} if headers is None else headers_of(headers.get_secret_value()),
    )


def _shared_server_options(settings: Settings) -> dict[str, Any]:
    """The ``ServerOptions`` by name; those named like a setting have its value."""
    _must_run_on_servers(settings)
    names = {field.name for field in fields(ServerOptions)} & Settings.model_fields.keys()
    values = {name: getattr(settings, name) for name in names}
    return values | {
        "reward_format": _format(settings),
        "endpoint": endpoint_options(settings),
        "version": own_version(),
    }


def server_options(settings: Settings) -> list[LaunchOptions]:
    """The options of the policy's server and, if the format reads one, of the reward model's, for
    this machine's first GPU.

    Raises SettingsError or ValueError naming what is wrong.
    """
    _must_run_on_servers(settings)
    if settings.kv_policy not in (orders := ("lru", *BACKENDS)):
        names = " or ".join(orders)
        raise SettingsError(f"{PREFIX}KV_POLICY = {settings.kv_policy!r}: servers have {names}")
    form, device = reward_format(_format(settings)), _device(settings)
    prm = settings.reward_model if form.needs_model else None
    shares = launch_shares(settings, device, prm, local_gpu())
    plain = LaunchOptions(
        model=settings.policy_model,
        python=settings.launch_python,
        device=device,
        memory=shares[0],
        kv_tokens=_kv_tokens(settings, "kv_tokens"),
        args=tuple(shlex.split(settings.policy_args)),
    )
    policy = replace(plain, seeds=True, kv_policy=settings.kv_policy, schedules=settings.speculate)
    if prm is None:
        return [policy]
    reward = replace(
        plain,
        model=prm,
        memory=shares[1],
        kv_tokens=_kv_tokens(settings, "prm_kv_tokens"),
        args=tuple(shlex.split(settings.reward_args)),
        classifies=form.reads_hidden,
    )
    return [policy, reward]


def _kv_tokens(settings: Settings, name: str) -> int | None:
    """The setting ``name``; None on a GPU if it is not set: the server fills its memory share."""
    explicit = _device(settings) == "cpu" or name in settings.model_fields_set
    return getattr(settings, name) if explicit else None


def _device(settings: Settings) -> Literal["cuda", "cpu"]:
    """The device that launched servers run on."""
    return launch_device() if settings.launch_device == AUTO else settings.launch_device


def _format(settings: Settings) -> str:
    """The reward format, ``none`` if its reward model is missing. Raises SettingsError."""
    form = known_format(settings)
    if reward_format(form).needs_model and settings.reward_model is None:
        log.info("no reward model: rewards are the policy's mean log-probabilities")
        return "none"
    return form


def _must_run_on_servers(settings: Settings) -> None:
    """Raises SettingsError for settings that only the embedded engine supports."""
    if settings.embedder == "hidden":
        raise SettingsError(
            f"{PREFIX}EMBEDDER = 'hidden': servers give no hidden states away; "
            "lexical, encoder or endpoint is needed"
        )


def endpoint_options(settings: Settings) -> EndpointOptions | None:
    """The URL, model and key of the embeddings endpoint; None if no URL is set."""
    if settings.embeddings_url is None:
        return None
    key = settings.embeddings_key
    secret = None if key is None else key.get_secret_value()
    return EndpointOptions(settings.embeddings_url, settings.embeddings_model, secret)


def further_models(settings: Settings) -> list[Settings]:
    """The settings of each model of ``models_file``, in its order; empty without a file.

    Raises SettingsError naming the file, the table and the field.
    """
    path = settings.models_file
    if path is None:
        return []
    try:
        tables = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(f"{variable('models_file')} = '{path}': {error}") from None
    if settings.model in tables:
        raise SettingsError(f"{path}, [{settings.model}]: this is HEDGEROW_MODEL's own name")
    return [_settings(settings, name, table, f"{path}, [{name}]") for name, table in tables.items()]


def _settings(settings: Settings, name: str, table: Any, where: str) -> Settings:
    if not isinstance(table, dict):
        raise SettingsError(f"{where}: must be a table")
    unknown = [field for field in table if field not in FIELDS]
    if unknown:
        raise SettingsError(f"{where}: {unknown[0]}: not a model's; known are {', '.join(FIELDS)}")
    overrides = {"models_file": None, "model": name, "engine": "embedded"}
    servers = settings.model_dump(exclude_unset=True) | overrides
    if "policy_model" in table:
        for name_to_drop in ("kv_theta", "tuned"):  # these were fitted to another model
            servers.pop(name_to_drop, None)
    try:
        return settings_by_name(servers | table, str)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}") from None
