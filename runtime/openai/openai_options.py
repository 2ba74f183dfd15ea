"""The options of an engine over OpenAI-compatible servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from runtime.reward_format import reward_format
from runtime.servers.remote_server import check_url
from runtime.servers.server_options import ServerOptions


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that servers serve, and how these are reached.

    ``checkpoint``: a folder with its tokenizer; ``urls``: all serve the same model; ``name``: its
    name there, None if it is their only model; ``key``: sent as a bearer token; ``headers``: of
    every request.
    """

    checkpoint: str | Path
    urls: tuple[str, ...]
    name: str | None = None
    key: str | None = field(default=None, repr=False)
    headers: Mapping[str, str] = field(default_factory=dict, repr=False)

    def all_headers(self) -> dict[str, str]:
        """The headers of every request, with the key's if there is one."""
        authorization = {} if self.key is None else {"Authorization": f"Bearer {self.key}"}
        return {**self.headers, **authorization}


@dataclass(frozen=True, slots=True)
class OpenaiOptions(ServerOptions):
    """``policy`` and, if the format needs one, ``reward``; the format ``score`` does not read the
    reward model's checkpoint."""

    policy: ServedModel
    reward: ServedModel | None = None

    def __post_init__(self) -> None:
        ServerOptions.__post_init__(self)
        if not self.policy.urls:
            raise ValueError("policy_urls: none; at least one server is needed")
        for name, model in (("policy_urls", self.policy), ("reward_urls", self.reward)):
            for url in model.urls if model else ():
                check_url(name, url)
        form = reward_format(self.reward_format)
        if (form.needs_model or form.by_score_route) and not (self.reward and self.reward.urls):
            addition = "" if form.by_score_route else " and its checkpoint's folder"
            raise ValueError(
                f"reward_urls: none; reward_format {self.reward_format!r} needs a server{addition}"
            )
