"""The parts that all routes share, and their tokenizer, which serves one thread at a time."""

from __future__ import annotations

import asyncio
import ctypes
import hashlib
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any, TypeVar

from runtime.profiles import PROFILES, Profile
from runtime.text import Text
from search.engine import Capabilities, Engine
from search.outcome_rewards import outcome_refusal
from search.policies.policy import Scores
from search.reward_needs import field_in_need
from server.admission import Admission
from server.api_keys import ApiKeys
from server.kept_searches import SearchStore
from server.prometheus_metrics import Metrics
from server.quotas import Quotas
from server.reply_schema import CompiledSchemas, RequestedSchema
from server.reply_text import opens_reasoning
from server.request_models import IgnoredFields
from server.reward_settings import models_of
from server.search_runner import SearchRunner
from server.settings import Settings, SettingsError, variable
from server.tree_log import TreeLog
from server.tuned import TunedSearch, TunedSearches, read_tuned
from server.typical_cost import TypicalCost

if TYPE_CHECKING:
    from server.tracing import Tracing

T = TypeVar("T")
log = logging.getLogger("hedgerow")

LONG = 1 << 15
"""The characters from which a text is long: encoding it takes tens of milliseconds."""


async def thread_in_turn(lock: asyncio.Lock, work: Callable[[], T]) -> T:
    """Run ``work`` in a thread while holding ``lock``; return its result. If the caller is
    cancelled, the lock is still held until the thread has finished."""
    async with lock:
        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(thread)
        finally:  # a cancelled caller must not release the lock while the thread runs
            await asyncio.wait({thread})
            if not thread.cancelled():
                thread.exception()  # marks an error as retrieved if the caller was cancelled


class Tokenizing:
    """Runs a tokenizer in threads beside the event loop, one at a time.

    Long texts have a second tokenizer and are encoded one after the other; their memory is returned
    to the system.
    """

    def __init__(self) -> None:
        self._short = asyncio.Lock()
        self._long = asyncio.Lock()
        self._long_text: Text | None = None

    async def run(self, text: Text, size: int, encode: Callable[[Text], T]) -> T:
        """Run ``encode`` on a tokenizer, for a text of ``size`` characters; return its result."""
        if size < LONG:
            return await thread_in_turn(self._short, lambda: encode(text))
        return await thread_in_turn(self._long, lambda: self._encode_long(text, encode))

    def _encode_long(self, text: Text, encode: Callable[[Text], T]) -> T:
        if self._long_text is None:
            self._long_text = text.another()
        try:
            return encode(self._long_text)
        finally:  # the C library keeps freed memory unless told to return it
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)


DECIDING = ("numpy", "scipy", "pulp", "math-verify", "sympy", "llguidance")
"""Libraries whose version may change how ties break, answers compare or schemas compile."""


@dataclass(frozen=True)
class Service:
    """The parts of a server for one of its models.

    ``draining`` is set when the server shuts down. ``tokenizing`` serialises the tokenizer's use in
    threads; ``reading`` and ``compiling`` serialise parsing kept documents and compiling schemas.
    ``tuned``: the searches of ``hedgerow tune`` for the model. ``others``: further models by name,
    each with its own engine, text, tokenizing, tuned searches and typical costs.
    """

    settings: Settings
    runner: SearchRunner
    text: Text
    metrics: Metrics
    ignored: IgnoredFields
    store: SearchStore
    trees: TreeLog
    keys: ApiKeys
    quotas: Quotas
    admission: Admission
    traces: Tracing | None = None
    tuned: TunedSearches | None = None
    typical_cost: TypicalCost = field(default_factory=TypicalCost)
    draining: asyncio.Event = field(default_factory=asyncio.Event)
    tokenizing: Tokenizing = field(default_factory=Tokenizing)
    schemas: CompiledSchemas = field(default_factory=CompiledSchemas)
    compiling: asyncio.Lock = field(default_factory=asyncio.Lock)
    reading: asyncio.Lock = field(default_factory=asyncio.Lock)
    others: dict[str, Service] = field(default_factory=dict)

    def serving(self, model: str | None) -> Service:
        """The service of the model that a name or alias names; this one for unknown models."""
        return self.others.get((model or "").partition(":")[0], self)

    @property
    def models(self) -> list[Service]:
        """This service and those of the further models."""
        return [self, *self.others.values()]

    async def grammar(self, schema: RequestedSchema) -> str:
        """A schema as the engines take it. Raises ApiError naming what in it cannot be compiled."""
        return await thread_in_turn(self.compiling, lambda: self.schemas.grammar(schema))

    async def log_tree(self, document: dict[str, Any]) -> None:
        """Write a search's document to the file of trees; count it in the metrics if that fails."""
        await self.trees.write_beside(document, self.metrics.unwritten_trees.inc)

    async def close(self) -> None:
        """Cancel all tasks on all models and wait until they have released their trees."""
        await asyncio.gather(*(service.runner.close() for service in self.models))

    @asynccontextmanager
    async def lifetime(self, at_end: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
        """The app's lifespan: at its end cancel all tasks, then await ``at_end``."""
        yield
        await self.close()
        if at_end is not None:
            await at_end()

    @property
    def profile(self) -> Profile:
        """The profile: how the policy model is prompted and how its steps end."""
        return PROFILES[self.settings.profile]

    @cached_property
    def thinks(self) -> bool:
        """Whether the chat template itself opens the reply's thought."""
        prompt = self.text.encode_chat([{"role": "user", "content": "?"}])
        return opens_reasoning(prompt, self.text.encode)

    @cached_property
    def fingerprint(self) -> str:
        """``system_fingerprint``: version, model, answer rule, libraries and engine."""
        engine = self.runner.engine.capabilities.fingerprint
        settings = self.settings
        parts = f"hedgerow-{own_version()}", settings.model, settings.answers, libraries(), engine
        return "/".join(parts)


def libraries() -> str:
    """8 hex digits that identify the versions of the DECIDING libraries."""
    versions = [f"{name} {version(name)}" for name in DECIDING]
    return hashlib.sha256("\0".join(versions).encode()).hexdigest()[:8]


def own_version() -> str:
    """The installed distribution's version; ``unknown`` in a checkout that is not installed."""
    try:
        return version("hedgerow")
    except PackageNotFoundError:
        return "unknown"


def create_service(
    settings: Settings,
    engine: Engine,
    text: Text,
    trees: TreeLog | None = None,
    traces: Tracing | None = None,
) -> Service:
    """Create a server's parts for a running engine; the caller closes engine and traces.

    Raises SettingsError for API keys that cannot be read, and for a tuned file whose searches the
    engine cannot do.
    """
    metrics = Metrics()
    keys = ApiKeys.load(settings)
    admission = Admission(
        settings.max_running,
        settings.max_queued,
        settings.retry_after_seconds,
        settings.max_bodies_bytes,
        metrics.queue_wait.observe,
    )
    metrics.queue.set_function(lambda: admission.waiting)
    return Service(
        settings=settings,
        runner=_runner(engine, metrics, settings, traces),
        text=text,
        metrics=metrics,
        ignored=IgnoredFields(metrics.ignored),
        store=SearchStore(settings, time.monotonic),
        trees=trees or TreeLog(None),
        keys=keys,
        quotas=Quotas(keys.names, metrics),
        admission=admission,
        traces=traces,
        tuned=tuned_searches(settings, engine.capabilities),
    )


def add_model(service: Service, settings: Settings, engine: Engine, text: Text) -> None:
    """Add a further model, ``settings.model``, to a service."""
    service.others[settings.model] = replace(
        service,
        settings=settings,
        runner=_runner(engine, service.metrics, settings, service.traces),
        text=text,
        tuned=tuned_searches(settings, engine.capabilities),
        typical_cost=TypicalCost(),
        tokenizing=Tokenizing(),
        others={},
    )


def tuned_searches(settings: Settings, able: Capabilities) -> TunedSearches | None:
    """Read the tuned file of the settings, if there is one; warn if it was tuned on other models.

    Raises SettingsError for a search that needs rewards that the engine does not give.
    """
    if settings.tuned is None:
        return None
    tuned = read_tuned(settings.tuned)
    searches = {} if tuned.auto is None else {"auto": tuned.auto}
    searches |= {f"reasoning_effort.{name}": row for name, row in tuned.reasoning_effort.items()}
    for name, row in searches.items():
        if (refusal := _refusal(row, able)) is not None:
            key = f"{variable('tuned')} = '{settings.tuned}'"
            raise SettingsError(f"{key}: {name}.search.{refusal[0]}: {refusal[1]}")
    if others := tuned.others_than(models_of(settings)):
        log.warning("%s was tuned on other models (%s)", settings.tuned, "; ".join(others))
    return tuned


def _refusal(tuned: TunedSearch, able: Capabilities) -> tuple[str, str] | None:
    """The field of a search that the engine does not support and why; None if it supports all."""
    field = field_in_need(tuned.search, Scores.FINISHED)
    if field is not None and not able.scores:
        return field, "it needs a reward model; there is none"
    return outcome_refusal(tuned.search) if able.outcome else None


def _runner(
    engine: Engine, metrics: Metrics, settings: Settings, traces: Tracing | None
) -> SearchRunner:
    able = engine.capabilities
    metrics.serves(settings.model, able.engine, own_version(), able.kernel)
    if traces is None:
        return SearchRunner(engine, metrics, settings.answers)
    functions = traces.search, traces.complete, traces.score
    return SearchRunner(engine, metrics, settings.answers, *functions)
