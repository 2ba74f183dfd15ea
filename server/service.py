"""What every route shares, put together once; its tokenizer bears one user at a time."""

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
from search.context_limit import needs_rewards
from search.engine import Capabilities, Engine
from search.outcome_rewards import outcome_refusal
from server.admission import Admission
from server.api_keys import ApiKeys
from server.kept_searches import SearchStore
from server.prometheus_metrics import Metrics
from server.quotas import Quotas
from server.reply_schema import AskedSchema, CompiledSchemas
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
"""Characters from which a text is long; one of them takes tens of milliseconds."""


async def thread_in_turn(lock: asyncio.Lock, work: Callable[[], T]) -> T:
    """What ``work`` comes to in a thread beside the event loop, whose turn it is when ``lock`` is
    free; it is done with then, also where nobody waits for it any more."""
    async with lock:
        thread = asyncio.create_task(asyncio.to_thread(work))
        try:
            return await asyncio.shield(thread)
        finally:  # whoever leaves meanwhile does not let the next one in beside the thread
            await asyncio.wait({thread})
            if not thread.cancelled():
                thread.exception()  # where nobody waits, nobody hears of an error


class Tokenizing:
    """A tokenizer bears one user at a time, in a thread beside the event loop.

    Long texts have one of their own and go one after the other; what they needed is given back.
    """

    def __init__(self) -> None:
        self._short = asyncio.Lock()
        self._long = asyncio.Lock()
        self._long_text: Text | None = None

    async def run(self, text: Text, size: int, encode: Callable[[Text], T]) -> T:
        """What ``encode`` makes of a text of so many characters."""
        if size < LONG:
            return await thread_in_turn(self._short, lambda: encode(text))
        return await thread_in_turn(self._long, lambda: self._encode_long(text, encode))

    def _encode_long(self, text: Text, encode: Callable[[Text], T]) -> T:
        if self._long_text is None:
            self._long_text = text.another()
        try:
            return encode(self._long_text)
        finally:  # the C library keeps freed memory unless it is told to return it
            with suppress(OSError, AttributeError):
                ctypes.CDLL(None).malloc_trim(0)


DECIDING = ("numpy", "scipy", "pulp", "math-verify", "sympy", "llguidance")
"""Another version of these may break ties, class answers or read a schema otherwise."""


@dataclass(frozen=True)
class Service:
    """One server's parts.

    ``draining`` is set once the server has been told to end. ``tokenizing``: who uses the tokenizer
    in a thread, and when; ``reading``, ``compiling``: kept documents are read one after the other,
    and schemas tried. ``tuned``: searches that were found worth their tokens on the model.
    ``others``: further models by name, each with an engine, a text and tuned searches of its own;
    all else they share.
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
        """The service of the model that a name or an alias begins with; for unknown ones this."""
        return self.others.get((model or "").partition(":")[0], self)

    @property
    def models(self) -> list[Service]:
        """This service, and those of the further models."""
        return [self, *self.others.values()]

    async def grammar(self, schema: AskedSchema) -> str:
        """A schema as the engines take it. Raises ApiError naming what in it cannot be held to."""
        return await thread_in_turn(self.compiling, lambda: self.schemas.grammar(schema))

    async def log_tree(self, document: dict[str, Any]) -> None:
        """Write a search's document to the file of trees; counted where that does not go."""
        await self.trees.write_beside(document, self.metrics.unwritten_trees.inc)

    async def close(self) -> None:
        """Cancel what is under way, on any model, and wait until it has let go of its trees."""
        await asyncio.gather(*(service.runner.close() for service in self.models))

    @asynccontextmanager
    async def lifetime(self, at_end: Callable[[], Awaitable[None]] | None) -> AsyncIterator[None]:
        """Of an app over it: at its end what is under way is cancelled, then ``at_end`` awaited."""
        yield
        await self.close()
        if at_end is not None:
            await at_end()

    @property
    def profile(self) -> Profile:
        """How the policy model is asked, and ends a step."""
        return PROFILES[self.settings.profile]

    @cached_property
    def thinks(self) -> bool:
        """Whether the chat template itself opens the reply's thought."""
        prompt = self.text.encode_chat([{"role": "user", "content": "?"}])
        return opens_reasoning(prompt, self.text.encode)

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


def create_service(
    settings: Settings,
    engine: Engine,
    text: Text,
    trees: TreeLog | None = None,
    traces: Tracing | None = None,
) -> Service:
    """A server's parts over a running engine, which stays its caller's to close, as do traces.

    Raises SettingsError for API keys that cannot be read, and for a tuned file that is not for the
    engine.
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
    """Let a service serve one more model, ``settings.model``, beside its own."""
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
    """What the file of the settings says, None without one; a warning if it is of other models.

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
    """The field that the engine cannot do, and why."""
    if needs_rewards(tuned.search) and not able.scores:
        return "policy", f"{tuned.search.policy!r} and its vote need a reward model; there is none"
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
