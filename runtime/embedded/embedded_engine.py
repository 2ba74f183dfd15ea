"""The embedded engine as the server sees it: ``search.engine.Engine`` over its own process."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain, count
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from runtime.embedded.options import EngineOptions
from runtime.embedded.pipe import (
    ClientEnd,
    Done,
    Embed,
    EngineEnd,
    Expand,
    Failed,
    FromEngine,
    LogLine,
    Ping,
    PipeLogHandler,
    Ready,
    Release,
    Score,
    StartFailed,
    StepWords,
    ToEngine,
    TreeHint,
    in_parts,
    readings,
    rounds,
)
from runtime.embedders.endpoint import Endpoint
from runtime.embedders.lexical import embed_texts
from search.counters import Counters, Usage
from search.engine import (
    Branch,
    Capabilities,
    EngineDown,
    Hint,
    KvMoved,
    Sampling,
    Step,
    Trajectory,
)

T = TypeVar("T")


class EmbeddedEngine:
    """A client of the engine's process; create it with ``start``.

    When the process dies, every running call raises EngineDown at once, and so does every later
    one until ``restart``. It must be used in the event loop that it was started in.
    """

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._calls = count(1)
        self._pending: dict[int, asyncio.Future[Any]] = {}
        self._kv_moves: dict[str, KvMoved] = {}
        self._client: ClientEnd | None = None
        self._loading: ClientEnd | None = None
        self._started: asyncio.Future[None] | None = None
        self._capabilities: Capabilities | None = None
        self._usage: Usage | None = None
        self._endpoint: Endpoint | None = None
        if options.embedder == "endpoint" and options.endpoint is not None:
            self._endpoint = Endpoint(options.endpoint)

    @classmethod
    async def start(cls, options: EngineOptions) -> EmbeddedEngine:
        """Spawn the process and wait until the models are loaded.

        Raises ValueError, OSError or RewardMissing for wrong options; EngineDown if the process
        dies.
        """
        engine = cls(options)
        await engine._launch()
        return engine

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; constant while it runs."""
        assert self._capabilities is not None, "the engine was not started"
        return self._capabilities

    @property
    def pid(self) -> int | None:
        """The engine process's id; None while there is no process."""
        client = self._client or self._loading
        return client.process.pid if client else None

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch, in the order of ``branches``."""
        return await self._ask_in_parts(
            rounds(branches), lambda call, part: Expand(call, tree, part, sampling)
        )

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One unrounded reward in [0, 1] for each trajectory."""
        return await self._ask_in_parts(
            readings(trajectories), lambda call, part: Score(call, tree, prompt, question, part)
        )

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """One vector for each trajectory's last step, by what ``capabilities.embeds`` names."""
        texts = [trajectory.texts[-1] for trajectory in trajectories]
        if self._endpoint is not None:
            return await self._endpoint.embed_texts(texts)
        if self._options.embedder == "lexical":
            return await asyncio.to_thread(embed_texts, texts)
        steps = [StepWords(t.steps[-1], t.texts[-1]) for t in trajectories]
        return await self._ask_in_parts(
            in_parts(steps, [0] * len(steps), 0), lambda call, part: Embed(call, tree, part)
        )

    def hint(self, tree: str, hint: Hint) -> None:
        """Send a hint about a tree to the KV manager; it is dropped, harmlessly, if the engine is
        down. Raises CallFault for a hint that cannot be sent.
        """
        if self._client is not None:
            self._client.send(TreeHint(tree, hint))

    def kv_moved(self, tree: str) -> KvMoved | None:
        """What happened to a tree's KV since the last call, as the engine last reported it."""
        return self._kv_moves.pop(tree, None)

    async def release(self, tree: str) -> Counters:
        """Release a tree and return what it cost; all zero for an unknown tree."""
        self._kv_moves.pop(tree, None)
        return await self._ask(lambda call: Release(call, tree))

    async def abort(self, tree: str) -> Counters:
        """Stop all calls of a tree, which raise EngineError, and free its KV."""
        return await self.release(tree)

    async def usage(self) -> Usage:
        """KV and queues as last reported; a busy engine reports every quarter second or so."""
        self._must_be_up()
        assert self._usage is not None, "a started engine has reported"
        return self._usage

    async def health(self) -> None:
        """Raise EngineDown if the process is gone, is still loading, or owes an answer and has sent
        nothing for ``stall_seconds``.

        Returns at once: an idle process is sent a ping, and a later call looks for its answer.
        """
        client = self._must_be_up()
        quiet = client.quiet_seconds()
        if quiet > self._options.stall_seconds:
            raise EngineDown(f"the engine has said nothing for {quiet:.0f} s")
        if not self._pending:
            call = next(self._calls)
            self._pending[call] = asyncio.get_running_loop().create_future()
            client.send(Ping(call))

    async def restart(self) -> None:
        """End the process, fail its running calls, and start a new one."""
        await self._end()
        await self._launch()

    async def close(self) -> None:
        """End the process and fail its running calls."""
        await self._end()
        if self._endpoint is not None:
            await self._endpoint.close()

    async def _end(self) -> None:
        clients = [client for client in (self._client, self._loading) if client is not None]
        self._client = self._loading = None
        self._fail_all(EngineDown("the engine was closed"))
        for client in clients:
            await asyncio.to_thread(client.end)

    async def _launch(self) -> None:
        self._started = asyncio.get_running_loop().create_future()
        client: ClientEnd | None = None

        def receive(message: FromEngine | None) -> None:
            if client is not None and client in (self._client, self._loading):
                self._receive(client, message)

        log_level = logging.getLogger().getEffectiveLevel()
        client = self._loading = ClientEnd(partial(_run_engine, self._options, log_level), receive)
        try:
            await self._started
        except BaseException:
            await self.close()
            raise

    async def _ask(self, message: Callable[[int], ToEngine]) -> Any:
        [answer] = await self._ask_all([message])
        return answer

    async def _ask_all(self, messages: Sequence[Callable[[int], ToEngine]]) -> list[Any]:
        client = self._must_be_up()
        answers: dict[int, asyncio.Future[Any]] = {}
        try:
            for message in messages:
                call = next(self._calls)
                answers[call] = self._pending[call] = asyncio.get_running_loop().create_future()
                client.send(message(call))
            return [await answer for answer in answers.values()]
        finally:
            for call in answers:
                self._pending.pop(call, None)

    async def _ask_in_parts(
        self, parts: Sequence[tuple[T, ...]], message: Callable[[int, tuple[T, ...]], ToEngine]
    ) -> list[Any]:
        """Send a message for each part, all at once; the answers concatenated in order."""
        messages = [lambda call, part=part: message(call, part) for part in parts]
        return list(chain.from_iterable(await self._ask_all(messages)))

    def _must_be_up(self) -> ClientEnd:
        if self._client is None:
            raise EngineDown("the engine is " + ("loading" if self._loading else "not running"))
        return self._client

    def _receive(self, client: ClientEnd, message: FromEngine | None) -> None:
        """Handle a message from the current process, in the event loop."""
        match message:
            case None:
                self._client = self._loading = None
                self._fail_all(EngineDown("the engine's process has ended"))
                return
            case Ready(capabilities, usage):
                self._capabilities, self._usage = capabilities, usage
                self._client, self._loading = client, None
                self._settle(self._started, None)
            case StartFailed(error):
                self._settle(self._started, error)
            case Usage():
                self._usage = message
            case LogLine(level, logger, text):
                logging.getLogger(logger).log(level, "%s", text)
            case Done(call, value, usage, tree, moved):
                self._usage = usage
                if moved is not None and call in self._pending:
                    self._kv_moves[tree] = moved.after(self._kv_moves.get(tree))
                self._settle(self._pending.pop(call, None), value)
            case Failed(call, error, usage):
                self._usage = usage or self._usage
                self._settle(self._pending.pop(call, None), error)
        client.expect_more(bool(self._pending))

    def _fail_all(self, error: EngineDown) -> None:
        pending, self._pending = self._pending, {}
        for answer in (self._started, *pending.values()):
            self._settle(answer, error)

    @staticmethod
    def _settle(answer: asyncio.Future[Any] | None, value: object) -> None:
        """Set a future's result, or its exception, unless it is done already."""
        if answer is None or answer.done():
            return
        if isinstance(value, Exception):
            answer.set_exception(value)
            answer.exception()  # so that the event loop does not warn if nobody awaits it
        else:
            answer.set_result(value)


def let_threads_rest() -> None:
    """Make idle threads of torch sleep soon, unless ``OMP_WAIT_POLICY`` is set.

    A thread that has done its part of an operation spins for a fraction of a millisecond, because
    waking it each time costs more than it gains; then it leaves its core to the server beside it.
    Must be called before torch is loaded.
    """
    if "OMP_WAIT_POLICY" not in os.environ:
        os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def _run_engine(options: EngineOptions, log_level: int, pipe: Connection) -> None:
    """The spawned process's main function; only that process loads torch and the models."""
    end = EngineEnd(pipe)
    logging.basicConfig(level=log_level, handlers=[PipeLogHandler(end)])
    let_threads_rest()
    from runtime.embedded import engine_loop

    engine_loop.run(end, options)
