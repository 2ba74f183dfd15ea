"""The options of a SGLang engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from runtime.reward_format import reward_format
from runtime.servers.remote_server import check_url
from runtime.servers.server_options import ServerOptions


@dataclass(frozen=True, slots=True)
class SglangOptions(ServerOptions):
    """``policy`` and ``prm``: folders with the tokenizers and sizes of the models that the servers
    at ``policy_urls`` and ``reward_urls`` serve; all servers of a kind serve the same model.

    ``speculate``: idle policy servers draw steps that rounds may ask for next, which needs servers
    that admit by priority; ``lookahead``: such a step is scored with the one before it.
    """

    policy: str | Path
    policy_urls: tuple[str, ...]
    prm: str | Path | None = None
    reward_urls: tuple[str, ...] = ()
    reward_format: str = field(default="math-shepherd", kw_only=True)
    speculate: bool = field(default=False, kw_only=True)
    lookahead: bool = field(default=True, kw_only=True)

    def __post_init__(self) -> None:
        ServerOptions.__post_init__(self)
        if not self.policy_urls:
            raise ValueError("policy_urls: none; at least one SGLang server is needed")
        for name in ("policy_urls", "reward_urls"):
            for url in getattr(self, name):
                check_url(name, url)
        needed = reward_format(self.reward_format).needs_model
        if needed and not (self.prm and self.reward_urls):
            raise ValueError(
                f"reward_urls: {self.reward_urls}; reward_format {self.reward_format!r} needs a "
                "server and its checkpoint's folder"
            )
