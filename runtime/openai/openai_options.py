"""What an engine over OpenAI-compatible servers is started with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, get_args

from runtime.embedders.endpoint import EndpointOptions
from runtime.reward_format import reward_format
from runtime.servers.remote_server import ServerTimes, check_url

EmbedderName = Literal["lexical", "encoder", "endpoint"]


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What servers serve, and how they are asked.

    ``checkpoint``: a folder with its tokenizer; ``urls``: all serve the same model; ``name``: what
    they call it, None for the only one that they have; ``key``: sent as a bearer token;
    ``headers``: of every request.
    """

    checkpoint: str | Path
    urls: tuple[str, ...]
    name: str | None = None
    key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def all_headers(self) -> dict[str, str]:
        """The key among them."""
        own = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return {**self.headers, **own}


@dataclass(frozen=True, slots=True)
class OpenaiOptions:
    """``policy`` and, where the format reads one, ``reward``, whose checkpoint ``score`` leaves
    unread.

    ``top``: of a step's last token so many likeliest log-probabilities are asked for, for its
    entropy. Times, ``recovery_seconds``, ``routing``, ``embedder`` and ``version`` as in
    ``SglangOptions``.
    """

    policy: ServedModel
    reward: ServedModel | None = None
    reward_format: str = "none"
    embedder: EmbedderName = "lexical"
    encoder: str | Path | None = None
    endpoint: EndpointOptions | None = None
    top: int = 16
    times: ServerTimes = field(default_factory=ServerTimes)
    start_seconds: float = 600.0
    routing: str = "none"
    recovery_seconds: float = 600.0
    version: str = ""

    def __post_init__(self) -> None:
        if not self.policy.urls:
            raise ValueError("policy_urls: none; at least one server is needed")
        for name, model in (("policy_urls", self.policy), ("reward_urls", self.reward)):
            for url in model.urls if model else ():
                check_url(name, url)
        form = reward_format(self.reward_format)
        judged = form.needs_model or form.by_score_route
        if judged and not (self.reward and self.reward.urls):
            also = "" if form.by_score_route else " and its checkpoint's folder"
            raise ValueError(
                f"reward_urls: none; reward_format {self.reward_format!r} needs a server{also}"
            )
        if self.embedder not in get_args(EmbedderName):
            allowed = ", ".join(get_args(EmbedderName))
            raise ValueError(f"embedder: {self.embedder!r}; the openai engine has {allowed}")
        for needy in ("encoder", "endpoint"):
            if self.embedder == needy and getattr(self, needy) is None:
                raise ValueError(f"{needy}: None; embedder {needy!r} needs one")
