"""A search under way on OpenAI-compatible servers: what it has drawn, read and cost."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Coroutine, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from runtime.openai.completion_server import CompletionServer
from runtime.reward_format import Spelt
from runtime.servers.request_costs import Path, RequestCosts
from runtime.servers.search_tasks import SearchTasks

SALT_BYTES = 24
K = TypeVar("K", bound=Hashable)
AskNumbers = Callable[[Sequence[K]], Coroutine[Any, Any, list[float]]]
"""Asks for a number for each of some keys, in their order."""


@dataclass(eq=False, slots=True)
class OpenaiSearch:
    """What is known of one search, the ``number``th one here.

    ``read``: the paths that its policy server has had in its cache; ``logprobs``: of each path the
    last step's sum and number of tokens; ``spelt``: what the reward model reads of its steps.
    """

    tree: str
    number: int
    costs: RequestCosts
    prompt: Path = ()
    read: set[Path] = field(default_factory=set)
    logprobs: dict[Path, tuple[float, int]] = field(default_factory=dict)
    spelt: Spelt = field(default_factory=dict)
    tasks: SearchTasks = field(default_factory=SearchTasks)
    _server: tuple[CompletionServer, int] | None = None

    def apart(self) -> OpenaiSearch:
        """The same search with costs and paths of their own: stopped with it."""
        costs = RequestCosts(self.costs.flops)
        return replace(self, costs=costs, prompt=(), read=set(), logprobs={}, _server=None)

    def on(self, server: CompletionServer) -> None:
        """The next request goes there; another server than the last has read nothing yet, nor has
        one that was lost since."""
        life = server, server.failures
        if life != self._server:
            self.read.clear()
        self._server = life

    async def asked_once(self, keys: Sequence[K], ask: AskNumbers[K]) -> list[float]:
        """A number for each key; keys that are alike are asked for once."""
        unlike = list(dict.fromkeys(keys))
        if not unlike:
            return []
        (numbers,) = await self.tasks.together(self.tree, [ask(unlike)])
        by_key = dict(zip(unlike, numbers, strict=True))
        return [by_key[key] for key in keys]

    def marks(self, server: CompletionServer) -> dict[str, Any]:
        """What keeps cached tokens, and what their timing tells, within an API key's searches; of
        vLLM, that older searches' requests go first where it schedules by priority."""
        marks: dict[str, Any] = {"priority": self.number} if server.vllm else {}
        if namespace := self.tree.rpartition("/")[0]:
            salt = hashlib.blake2b(namespace.encode(), digest_size=SALT_BYTES).hexdigest()
            marks["cache_salt"] = salt
        return marks
