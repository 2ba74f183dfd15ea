"""A search under way on OpenAI-compatible servers."""

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
"""Asks for a number for each of some keys, in their order."""


@dataclass(eq=False, slots=True)
class OpenaiSearch(ServedSearch):
    """The ``number``th one here."""

    number: int

    async def ask_once(self, keys: Sequence[K], ask: AskNumbers[K]) -> list[float]:
        """A number for each key; keys that are alike are asked for once."""
        distinct = list(dict.fromkeys(keys))
        if not distinct:
            return []
        (numbers,) = await self.together([ask(distinct)])
        by_key = dict(zip(distinct, numbers, strict=True))
        return [by_key[key] for key in keys]

    def marks(self, server: CompletionServer) -> dict[str, Any]:
        """What keeps cached tokens, and what their timing tells, within an API key's searches; of
        vLLM, that older searches' requests go first where it schedules by priority."""
        marks: dict[str, Any] = {"priority": self.number} if server.vllm else {}
        if self.namespace:
            salt = hashlib.blake2b(self.namespace.encode(), digest_size=SALT_BYTES).hexdigest()
            marks["cache_salt"] = salt
        return marks
