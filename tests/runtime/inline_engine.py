"""An engine in the test's own process: scheduler and scorer on hash models."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

from loadtest.in_process import SteppedEngine
from search.controller import search
from search.counters import Counters
from search.engine import Branch, Capabilities, EngineError, Sampling, Step, Trajectory
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec
from tests.runtime.hash_model import CONTEXT
from tests.runtime.scheduler_support import scheduler
from tests.runtime.test_reward_scorer import scorer


class InlineEngine(SteppedEngine):
    """An engine over a scheduler and a scorer, within the hash model's context.
    ``on_step`` is called before every iteration."""

    def __init__(
        self,
        *,
        lookahead: bool = False,
        kv_tokens: int = 8000,
        batch_limit: int = 64,
        on_step: Callable[[], None] = lambda: None,
        **changes: Any,
    ) -> None:
        """``changes``: fields of the scheduler's options."""
        sizes = {"kv_tokens": kv_tokens, "batch_limit": batch_limit}
        self.policy, _ = scheduler(**sizes, **changes)
        self.prm, _ = scorer(**sizes)
        able = Capabilities(
            engine="inline",
            models={"policy": "hash", "prm": "hash"},
            exact=True,
            scores=True,
            embeds="lexical",
            context_tokens=CONTEXT,
            fingerprint="inline-1",
        )
        super().__init__(able, self.policy, self.prm)
        self.on_step = on_step
        self._lookahead = lookahead
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._turning: asyncio.Task[None] | None = None

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw a step for each branch."""
        return await self._ask(lambda call: self.policy.expand(call, tree, branches, sampling))

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """Score trajectories, with finished next steps ahead if ``lookahead`` is on."""
        early = self.policy.beam_extension
        ahead = early.finished_next_steps(tree, trajectories) if self._lookahead else {}
        return await self._ask(
            lambda call: self.prm.score(call, tree, prompt, question, trajectories, ahead)
        )

    async def release(self, tree: str) -> Counters:
        """Abort what is left of the tree and return its costs."""
        return await self.abort(tree)

    async def abort(self, tree: str) -> Counters:
        """Abort the tree in both; its waiting callers get EngineError."""
        for call in self.policy.abort(tree) + self.prm.abort(tree):
            self._settle(call, EngineError("aborted"))
        return await super().release(tree)

    async def _ask(self, begin: Callable[[int], None]) -> Any:
        call = next(self._calls)
        begin(call)
        answer = self._answers[call] = asyncio.get_running_loop().create_future()
        if self._turning is None or self._turning.done():
            self._turning = asyncio.create_task(self._turn())
        return await answer

    def _settle(self, call: int, answer: Any) -> None:
        waiting = self._answers.pop(call)
        if waiting.done():
            return
        if isinstance(answer, Exception):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    async def _turn(self) -> None:
        """Iterate while there is work, yielding to the searches in between."""
        while self.policy.busy or self.prm.busy:
            self.on_step()
            if self.policy.busy:
                for answer in self.policy.step():
                    self._settle(answer.call, answer.steps)
            if self.prm.busy:
                for call, rewards in self.prm.step():
                    self._settle(call, rewards)
            await asyncio.sleep(0)
            await asyncio.sleep(0)


async def grow(engine: InlineEngine, prompt: tuple[int, ...], spec: SearchSpec) -> Outcome:
    """Run one search; a reply's answer is its last letter."""
    return await search(
        Problem(prompt, "", "\n\n"),
        spec,
        engine,
        tree_id=f"{spec.policy}-{spec.seed}-{prompt[:3]}",
        answer_of=lambda text: text[-1:] or None,
        clock=lambda: 0.0,
    )
