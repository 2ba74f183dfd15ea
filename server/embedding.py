"""The embeddings endpoint from settings."""

from __future__ import annotations

from runtime.embedders.endpoint import EndpointOptions
from server.settings import Settings


def endpoint_options(settings: Settings) -> EndpointOptions | None:
    """Where the embeddings endpoint is; None if none is named."""
    if settings.embeddings_url is None:
        return None
    key = settings.embeddings_key
    secret = None if key is None else key.get_secret_value()
    return EndpointOptions(settings.embeddings_url, settings.embeddings_model, secret)
