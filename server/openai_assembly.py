"""The openai engine from a server's settings."""

from __future__ import annotations

from typing import Literal

from runtime.embedders.endpoint import EndpointOptions
from runtime.openai.openai_engine import OpenaiEngine
from runtime.openai.openai_options import EmbedderName, OpenaiOptions, ServedModel
from runtime.reward_format import reward_format
from runtime.servers.remote_server import ServerTimes
from server.service import own_version
from server.setting_types import headers_of
from server.settings import Settings


async def openai_engine(
    settings: Settings, form: str, embedder: EmbedderName, endpoint: EndpointOptions | None
) -> OpenaiEngine:
    """``form``: the reward format. Raises ValueError naming what is wrong, EngineDown for a server
    that is not there."""
    return await OpenaiEngine.start(openai_options(settings, form, embedder, endpoint))


def openai_options(
    settings: Settings, form: str, embedder: EmbedderName, endpoint: EndpointOptions | None
) -> OpenaiOptions:
    """``form``: the reward format. Raises ValueError naming what is wrong."""
    kind = reward_format(form)
    return OpenaiOptions(
        policy=_served(settings, "policy"),
        reward=_served(settings, "reward") if kind.needs_model or kind.by_score_route else None,
        reward_format=form,
        embedder=embedder,
        encoder=settings.encoder,
        endpoint=endpoint,
        times=ServerTimes(
            settings.connect_seconds,
            settings.answer_seconds,
            settings.probe_seconds,
            settings.stall_seconds,
        ),
        start_seconds=settings.start_seconds,
        routing=settings.routing,
        recovery_seconds=settings.recovery_seconds,
        version=own_version(),
    )


def _served(settings: Settings, which: Literal["policy", "reward"]) -> ServedModel:
    checkpoint, key = getattr(settings, f"{which}_model"), getattr(settings, f"{which}_key")
    headers = settings.server_headers
    return ServedModel(
        checkpoint or settings.policy_model,
        getattr(settings, f"{which}_urls"),
        getattr(settings, f"{which}_name"),
        None if key is None else key.get_secret_value(),
        {} if headers is None else headers_of(headers.get_secret_value()),
    )
