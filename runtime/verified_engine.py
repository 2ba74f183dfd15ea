"""An engine whose rewards come from a verifier, or are multiplied by a verifier's numbers."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from runtime.engine_wrapper import EngineWrapper
from runtime.verifiers.python_verifier import PythonVerifier
from runtime.verifiers.verifier import URLS, Judged, Verifier, VerifierOptions
from runtime.verifiers.verifier_endpoint import VerifierEndpoint
from search.counters import Usage
from search.engine import Capabilities, Engine, Trajectory, VerifierFailed
from search.tree import round_reward


async def start_verifier(options: VerifierOptions) -> Verifier:
    """Start the verifier that the options name. Raises ValueError naming what is wrong with it."""
    if options.name.startswith(URLS):
        return VerifierEndpoint(options)
    return await PythonVerifier.start(options)


class VerifiedEngine(EngineWrapper):
    """Rewards are the verifier's numbers if it is ``alone``, else the engine's rewards times these.

    A call that fails is an error of its search only.
    """

    def __init__(
        self,
        engine: Engine,
        verifier: Verifier,
        *,
        alone: bool,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Closes both in the end. ``clock``: in seconds, to measure calls."""
        super().__init__(engine)
        self._verifier = verifier
        self._alone = alone
        self._clock = clock
        self._calls = self._failures = 0
        self._seconds = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """The engine's; ``exact`` and ``seeded`` hold only with a pure verifier."""
        able, pure = self._engine.capabilities, self._verifier.pure
        return replace(
            able,
            exact=able.exact and pure,
            seeded=able.seeded and pure,
            scores=True,
            likelihood=able.likelihood and not self._alone,
            fingerprint=f"{able.fingerprint}/{self._verifier.fingerprint}",
        )

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One reward in [0, 1] a trajectory, rounded as rewards are. May raise VerifierFailed."""
        verifier_rewards = self._judge(question, trajectories)
        if self._alone:
            return await verifier_rewards
        engine_rewards = super().score(tree, prompt, question, trajectories)
        rewards, factors = await asyncio.gather(engine_rewards, verifier_rewards)
        return [round_reward(r * f) for r, f in zip(rewards, factors, strict=True)]

    async def usage(self) -> Usage:
        """The engine's usage, with counts of the verifier's calls, failures and seconds."""
        usage = await super().usage()
        totals = replace(
            usage.totals,
            verifier_calls=self._calls,
            verifier_failures=self._failures,
            verifier_seconds=self._seconds,
        )
        return replace(usage, totals=totals)

    async def close(self) -> None:
        """Close the verifier and the engine."""
        await self._verifier.close()
        await self._engine.close()

    async def _judge(self, question: str, trajectories: Sequence[Trajectory]) -> list[float]:
        batch: list[Judged] = [{"question": question, "steps": [*t.texts]} for t in trajectories]
        self._calls += 1
        start = self._clock()
        try:
            return await self._verifier.verify(batch)
        except VerifierFailed:
            self._failures += 1
            raise
        finally:
            self._seconds += self._clock() - start
