"""What every route shares, put together once."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, Protocol

from server.admission import Admission
from server.api_keys import ApiKeys
from server.kept_searches import SearchStore
from server.limits import TypicalCost
from server.prometheus_metrics import Metrics
from server.quotas import Quotas
from server.reply_formats import opens_reasoning
from server.request_models import IgnoredFields
from server.search_runner import SearchRunner
from server.settings import Settings
from server.tokenizing import Tokenizing
from server.tree_log import TreeLog

if TYPE_CHECKING:
    from server.tracing import Tracing

DECIDING = ("numpy", "scipy", "pulp", "math-verify", "sympy")
"""Another version of these may break ties of an optimum, or class answers, differently."""


class ChatText(Protocol):
    """What is needed of the policy model's tokenizer."""

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Token ids of the messages under the chat template, ready for a reply."""
        ...

    def encode(self, text: str) -> list[int]:
        """Token ids of a text alone, nothing added."""
        ...

    def encode_prompt(self, text: str) -> list[int]:
        """The same. This and ``encode_chat`` may raise PrefixTooLong for what cannot fit."""
        ...

    def another(self) -> ChatText:
        """The same, for use in another thread."""
        ...


@dataclass(frozen=True)
class Service:
    """One server's parts.

    ``delimiter`` ends a step of the policy model's replies. ``draining`` is set once the server has
    been told to end. ``tokenizing``: who uses the tokenizer in a thread, and when; ``reading``:
    kept documents are read one after the other. ``others``:
    further models by name, each with an engine and a text of its own; all else they share.
    """

    settings: Settings
    runner: SearchRunner
    text: ChatText
    metrics: Metrics
    ignored: IgnoredFields
    store: SearchStore
    trees: TreeLog
    keys: ApiKeys
    quotas: Quotas
    admission: Admission
    traces: Tracing | None = None
    typical_cost: TypicalCost = field(default_factory=TypicalCost)
    delimiter: str = "\n\n"
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    tokenizing: Tokenizing = field(default_factory=Tokenizing)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    others: dict[str, Service] = field(default_factory=dict)

    def serving(self, model: str | None) -> Service:
        """The service of the model that a name or an alias begins with; for unknown ones this."""
        return self.others.get((model or "").partition(":")[0], self)

    @property
    def models(self) -> list[Service]:
        """This service, and those of the further models."""
        return [self, *self.others.values()]

    async def log_tree(self, document: dict[str, Any]) -> None:
        """Write a search's document to the file of trees; counted where that does not go."""
        await self.trees.write_beside(document, self.metrics.unwritten_trees.inc)

    async def close(self) -> None:
        """Cancel what is under way, on any model, and wait until it has let go of its trees."""
        await asyncio.gather(*(service.runner.close() for service in self.models))

    @cached_property
    def thinks(self) -> bool:
        """Whether the chat template itself opens the reply's thought."""
        asked = self.text.encode_chat([{"role": "user", "content": "?"}])
        return opens_reasoning(asked, self.text.encode)

    @cached_property
    def fingerprint(self) -> str:
        """``system_fingerprint``: version, model, answer rule, libraries, the engine's own."""
        engine = self.runner.engine.capabilities.fingerprint
        settings = self.settings
        parts = f"hedgerow-{own_version()}", settings.model, settings.answers, libraries(), engine
        return "/".join(parts)


def libraries() -> str:
    """8 hex digits over the versions of what decides ties and compares answers."""
    versions = [f"{name} {version(name)}" for name in DECIDING]
    return hashlib.sha256("\0".join(versions).encode()).hexdigest()[:8]


def own_version() -> str:
    """The installed distribution's version; ``unknown`` in a checkout that is not installed."""
    try:
        return version("hedgerow")
    except PackageNotFoundError:
        return "unknown"
