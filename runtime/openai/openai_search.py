"""A search in progress on OpenAI-compatible servers."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from runtime.openai.completion_server import CompletionServer
from runtime.servers.served_search import ServedSearch

SALT_BYTES = 24
K = TypeVar("K", bound=Hashable)
AskNumbers = Callable[[Sequence[K]], Coroutine[Any, Any, list[float]]]
"""Asks servers for one number for each key, in the order of the keys."""


@dataclass(eq=False, slots=True)
class OpenaiSearch(ServedSearch):
    """One search; ``number``: its place in the engine's order of arrival."""

    number: int

    async def ask_once(self, keys: Sequence[K], ask: AskNumbers[K]) -> list[float]:
        """A number for each key; equal keys are asked for once."""
        distinct = list(dict.fromkeys(keys))
        if not distinct:
            return []
        (numbers,) = await self.together([ask(distinct)])
        by_key = dict(zip(distinct, numbers, strict=True))
        return [by_key[key] for key in keys]

    def marks(self, server: CompletionServer) -> dict[str, Any]:
        """Fields for each request: a cache salt, if the server takes one, so that neither cached
        tokens nor their timing leak to other API keys; for vLLM a priority, by which older searches
        may go first."""
        marks: dict[str, Any] = {"priority": self.number} if server.vllm else {}
        if self.namespace and server.salts:
            salt = hashlib.blake2b(self.namespace.encode(), digest_size=SALT_BYTES).hexdigest()
            marks["cache_salt"] = salt
        return marks
