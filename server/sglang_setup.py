"""The SGLang engine from settings: on servers that run, or on servers that are started for it."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

from runtime.embedders.endpoint import EndpointOptions
from runtime.reward_format import reward_format
from runtime.sglang.launched_server import LaunchedServers, LaunchOptions, split_args
from runtime.sglang.sglang_engine import SglangEngine
from runtime.sglang.sglang_options import EmbedderName, SglangOptions
from server.lifecycle import Restartable
from server.service import own_version
from server.settings import PREFIX, Settings, SettingsError

log = logging.getLogger("hedgerow")


@asynccontextmanager
async def sglang_engine(
    settings: Settings,
) -> AsyncIterator[tuple[SglangEngine, Restartable | None]]:
    """The engine, and the servers where they are its own; both end afterwards.

    Raises SettingsError naming the key that is wrong, EngineDown for a server that is not there.
    """
    servers = LaunchedServers(server_options(settings)) if settings.launch else None
    if servers is None:
        engine = await SglangEngine.start(sglang_options(settings))
    else:
        urls = [server.url for server in servers.servers]
        await servers.start()
        try:
            options = sglang_options(settings, tuple(urls[:1]), tuple(urls[1:]))
            engine = await SglangEngine.start(options)
        except BaseException:
            await servers.close()
            raise
    try:
        yield engine, servers
    finally:
        await engine.close()
        if servers is not None:
            await servers.close()


def sglang_options(
    settings: Settings,
    policy_urls: tuple[str, ...] | None = None,
    reward_urls: tuple[str, ...] | None = None,
) -> SglangOptions:
    """The engine's options; servers that were started have the URLs given here.

    Raises SettingsError or ValueError naming what is wrong.
    """
    form = _format(settings)
    return SglangOptions(
        policy=settings.policy_model,
        policy_urls=settings.policy_urls if policy_urls is None else policy_urls,
        prm=settings.reward_model if reward_format(form).needs_model else None,
        reward_urls=settings.reward_urls if reward_urls is None else reward_urls,
        reward_format=form,
        embedder=_embedder(settings),
        speculate=settings.speculate,
        encoder=settings.encoder,
        endpoint=endpoint_options(settings),
        version=own_version(),
        stall_seconds=settings.stall_seconds,
    )


def server_options(settings: Settings) -> list[LaunchOptions]:
    """The policy's server, and the reward model's where the format reads one.

    Raises SettingsError or ValueError naming what is wrong.
    """
    form = reward_format(_format(settings))
    plain = LaunchOptions(
        model=settings.policy_model,
        python=settings.launch_python,
        device=settings.launch_device,
        memory=settings.launch_memory[0],
        kv_tokens=_kv_tokens(settings, "kv_tokens"),
        args=split_args(settings.policy_args),
    )
    evicts = settings.kv_policy == "arborkv"
    policy = replace(plain, seeds=True, evicts=evicts, schedules=settings.speculate)
    if not form.needs_model or settings.reward_model is None:
        return [policy]
    reward = replace(
        plain,
        model=settings.reward_model,
        memory=settings.launch_memory[1],
        kv_tokens=_kv_tokens(settings, "prm_kv_tokens"),
        args=split_args(settings.reward_args),
        classifies=form.reads_hidden,
    )
    return [policy, reward]


def _kv_tokens(settings: Settings, name: str) -> int | None:
    """What was asked for; on a GPU without a word what the memory's share holds."""
    asked = settings.launch_device == "cpu" or name in settings.model_fields_set
    return getattr(settings, name) if asked else None


def _format(settings: Settings) -> str:
    """The reward format; without a reward model that it needs, ``none``.

    Raises SettingsError for what is the embedded engine's alone.
    """
    if settings.kv_policy == "full":
        raise SettingsError(f"{PREFIX}KV_POLICY = 'full': SGLang evicts; lru or arborkv is needed")
    if reward_format(settings.reward_format).needs_model and settings.reward_model is None:
        log.info("no reward model: rewards are the policy's mean log-probabilities")
        return "none"
    return settings.reward_format


def _embedder(settings: Settings) -> EmbedderName:
    if settings.embedder == "hidden":
        raise SettingsError(
            f"{PREFIX}EMBEDDER = 'hidden': SGLang gives no hidden states away; "
            "lexical, encoder or endpoint is needed"
        )
    return settings.embedder


def endpoint_options(settings: Settings) -> EndpointOptions | None:
    """Where the embeddings endpoint is; None if none is named."""
    if settings.embeddings_url is None:
        return None
    key = settings.embeddings_key
    secret = None if key is None else key.get_secret_value()
    return EndpointOptions(settings.embeddings_url, settings.embeddings_model, secret)
