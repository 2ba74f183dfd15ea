"""What a SGLang engine is started with."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from runtime.embedders.endpoint import EndpointOptions
from runtime.reward_format import reward_format
from runtime.servers.remote_server import ServerTimes, check_url

EmbedderName = Literal["lexical", "encoder", "endpoint"]


@dataclass(frozen=True, slots=True)
class SglangOptions:
    """``policy`` and ``prm``: folders with the tokenizers and sizes of the models that the servers
    at ``policy_urls`` and ``reward_urls`` serve; all servers of a kind serve the same model.

    ``top``: of a step's last token so many likeliest log-probabilities are read, for its entropy.
    Seconds: ``connect_seconds`` to reach a server, ``answer_seconds`` for one request,
    ``probe_seconds`` for a sign of life, ``start_seconds`` for the servers to be there at start,
    ``stall_seconds`` without a byte after which one that owes an answer is taken for lost,
    ``recovery_seconds`` that a search waits for a lost one where there is no other.
    ``routing``: what routers at the URLs are told of trees, see ``routing.Routing``.
    ``embedder``: what embeds steps: letters alone, the checkpoint ``encoder``, or the server
    ``endpoint``; SGLang gives no hidden states away. ``speculate``: what rounds may ask for next is
    drawn where places are idle, on policy servers that let in by priority; ``lookahead``: such a
    step is scored with the one before it. ``version`` goes into the fingerprint.
    """

    policy: str | Path
    policy_urls: tuple[str, ...]
    prm: str | Path | None = None
    reward_urls: tuple[str, ...] = ()
    reward_format: str = "math-shepherd"
    embedder: EmbedderName = "lexical"
    speculate: bool = False
    lookahead: bool = True
    encoder: str | Path | None = None
    endpoint: EndpointOptions | None = None
    top: int = 16
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
        """How long a server may take."""
        return ServerTimes(
            self.connect_seconds, self.answer_seconds, self.probe_seconds, self.stall_seconds
        )

    def __post_init__(self) -> None:
        if not self.policy_urls:
            raise ValueError("policy_urls: none; at least one SGLang server is needed")
        for name in ("policy_urls", "reward_urls"):
            for url in getattr(self, name):
                check_url(name, url)
        if self.top < 1:
            raise ValueError(f"top: {self.top}; at least 1 is needed")
        needed = reward_format(self.reward_format).needs_model
        if needed and not (self.prm and self.reward_urls):
            raise ValueError(
                f"reward_urls: {self.reward_urls}; reward_format {self.reward_format!r} needs a "
                "server and its checkpoint's folder"
            )
        if self.embedder not in get_args(EmbedderName):
            allowed = ", ".join(get_args(EmbedderName))
            raise ValueError(f"embedder: {self.embedder!r}; the sglang engine has {allowed}")
        for needy in ("encoder", "endpoint"):
            if self.embedder == needy and getattr(self, needy) is None:
                raise ValueError(f"{needy}: None; embedder {needy!r} needs one")
