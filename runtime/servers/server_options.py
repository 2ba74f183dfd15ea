"""The options that all engines over servers share."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from runtime.embedders.endpoint import EndpointOptions
from runtime.servers.remote_server import ServerTimes
from runtime.servers.text_embedder import EmbedderName


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerOptions:
    """``reward_format``: a name or a ``.json`` file. ``embedder``: what embeds steps: n-grams of
    letters, the checkpoint ``encoder``, or the server ``endpoint``.

    Seconds: ``connect_seconds`` to reach a server, ``answer_seconds`` for one request,
    ``probe_seconds`` for a health check, ``start_seconds`` for the servers to be up at start,
    ``stall_seconds`` without a byte after which a server that owes an answer counts as lost,
    ``recovery_seconds`` that a search waits for a server when all are lost.
    ``routing``: headers for routers at the URLs, see ``routing.Routing``. ``version`` goes into
    the fingerprint.
    """

    reward_format: str = "none"
    embedder: EmbedderName = "lexical"
    encoder: str | Path | None = None
    endpoint: EndpointOptions | None = None
    connect_seconds: float = 10.0
    answer_seconds: float = 600.0
    probe_seconds: float = 20.0
    start_seconds: float = 600.0
    stall_seconds: float = 30.0
    routing: str = "none"
    recovery_seconds: float = 600.0
    version: str = ""

    @property
    def times(self) -> ServerTimes:
        """The time limits of requests to a server."""
        return ServerTimes(
            self.connect_seconds, self.answer_seconds, self.probe_seconds, self.stall_seconds
        )

    def __post_init__(self) -> None:
        for needy in ("encoder", "endpoint"):
            if self.embedder == needy and getattr(self, needy) is None:
                raise ValueError(f"{needy}: None; embedder {needy!r} needs one")
