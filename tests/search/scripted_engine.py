"""An engine without a model: deterministic, quick, and able to fail on demand.

Tokens are characters (``encode``/``decode``). A branch's text is a hash of its prefix and its
seed, so the tree depends on the seed alone, as with a real engine; or a test's own function gives
it. The default language: a few lines such as ``step 3``, then ``The answer is 2.`` and the end.
"""

from __future__ import annotations

import asyncio
import hashlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from search.controller import search
from search.counters import Counters, Usage
from search.engine import (
    Branch,
    Capabilities,
    EngineDown,
    Hint,
    Sampling,
    Step,
    TokenLogprob,
    Trajectory,
)
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec
from search.tree import Finish

END = 0
"""The end token; it is not part of a step's text."""


def encode(text: str) -> tuple[int, ...]:
    """The token ids of a text."""
    return tuple(map(ord, text))


def decode(tokens: Sequence[int]) -> str:
    """The text of token ids."""
    return "".join(chr(t) for t in tokens if t != END)


def dice(*parts: object) -> int:
    """A 64-bit hash of ``parts``."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return struct.unpack("<Q", digest)[0]


def babble(branch: Branch) -> str:
    """A step's text in the default language; without a final delimiter it is the last step."""
    roll = dice(branch.tokens, branch.seed)
    if roll % 3 == 0:
        return f"The answer is {roll // 3 % 4}."
    return f"step {roll // 3 % 8}\n\n"


def judge(steps: Sequence[str]) -> float:
    """The default reward model: a hash of the steps' texts, from 0 to 1."""
    return dice(tuple(steps)) % 100_001 / 100_000


def direction(text: str) -> list[float]:
    """The default embedding: two numbers from a hash of the text."""
    roll = dice("direction", text)
    return [roll % 7 - 3.0, roll // 7 % 5 - 1.5]


def answer_of(text: str) -> str | None:
    """The answer of a reply in the default language."""
    _, marker, rest = text.rpartition("The answer is ")
    return rest.removesuffix(".") if marker else None


def step_of(text: str, sampling: Sampling, limit: int) -> Step:
    """The step that an engine returns for the text ``text``, cut at ``limit`` tokens."""
    tokens = encode(text)
    finish = Finish.STEP
    if not any(text.endswith(stop) for stop in sampling.stop):
        tokens, finish = (*tokens, END), Finish.END
    if len(tokens) > limit:
        tokens, finish = tokens[:limit], Finish.LENGTH
    roll = dice(tokens) % 1000 / 1000
    return Step(tokens, decode(tokens), finish, logprob=-roll, entropy=roll)


def token_logprobs(tokens: Sequence[int], top: int) -> tuple[TokenLogprob, ...]:
    """Log-probabilities of -id/1024; the token is the likeliest, followed by the ids after it."""
    return tuple(
        TokenLogprob(-token / 1024, tuple((token + i, -(token + i) / 1024) for i in range(top)))
        for token in tokens
    )


@dataclass
class ScriptedEngine:
    """An ``Engine`` whose behaviour a test sets.

    ``say``: what a branch draws. ``score_of``: an unrounded reward from the texts of a path.
    ``fail_at``: the expand call (from 0) that raises EngineDown. ``gate``: expand waits for it;
    ``waiting`` is set while it does. ``still``: the names of the calls that never return, as of an
    engine that hangs. ``finish_order``: the permutation in which branches are drawn.
    ``vector_of``: an unrounded embedding from a step's text. ``on_expand``, ``on_score``,
    ``on_embed``: called at every call, for instance to advance a clock. Calls are recorded in
    ``expanded``, ``scored``, ``embedded``, ``hints``, ``live``, ``released``, ``aborted``.
    """

    say: Callable[[Branch], str] = babble
    score_of: Callable[[Sequence[str]], float] = judge
    scores: bool = True
    outcome: bool = False
    likelihood: bool = False
    logits_params: tuple[str, ...] = ()
    logprobs: bool = True
    grammar: bool = False
    step_logprobs: bool = True
    most_temperature: float = math.inf
    embeds: bool = True
    vector_of: Callable[[str], Sequence[float]] = direction
    context_tokens: int = 4096
    fail_at: int | None = None
    gate: asyncio.Event | None = None
    still: frozenset[str] = frozenset()
    finish_order: Callable[[int], Sequence[int]] = range
    on_expand: Callable[[], None] = lambda: None
    on_score: Callable[[], None] = lambda: None
    on_embed: Callable[[], None] = lambda: None
    waiting: asyncio.Event = field(default_factory=asyncio.Event)
    expanded: list[list[Branch]] = field(default_factory=list)
    samplings: list[Sampling] = field(default_factory=list)
    scored: list[list[Trajectory]] = field(default_factory=list)
    embedded: list[list[Trajectory]] = field(default_factory=list)
    hints: list[Hint] = field(default_factory=list)
    live: set[str] = field(default_factory=set)
    released: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    costs: dict[str, Counters] = field(default_factory=dict)
    down: bool = False
    closed: bool = False

    @property
    def capabilities(self) -> Capabilities:
        """An exact engine whose other capabilities are the test's."""
        models = {"policy": "script", "reward": "dice"} if self.scores else {"policy": "script"}
        return Capabilities(
            engine="scripted",
            models=models,
            exact=True,
            scores=self.scores,
            embeds="script" if self.embeds else None,
            context_tokens=self.context_tokens,
            fingerprint="scripted-1",
            outcome=self.outcome,
            likelihood=self.likelihood,
            logits_params=self.logits_params,
            logprobs=self.logprobs,
            grammar=self.grammar,
            step_logprobs=self.step_logprobs,
            most_temperature=self.most_temperature,
        )

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """The steps that ``say`` gives, in the order of ``branches``."""
        self.live.add(tree)
        if self.down or self.fail_at == len(self.expanded):
            self.down = True
            raise EngineDown("the engine is down")
        self.expanded.append(list(branches))
        await self._move("expand")
        self._charge(tree, decoded_tokens=len(branches))
        self.samplings.append(sampling)
        if self.gate is not None:
            self.waiting.set()
            await self.gate.wait()
        steps: dict[int, Step] = {}
        for i in self.finish_order(len(branches)):
            await asyncio.sleep(0)
            branch = branches[i]
            steps[i] = step_of(self.say(branch), sampling, branch.limit)
            if sampling.logprobs is not None:
                steps[i] = replace(
                    steps[i], logprobs=token_logprobs(steps[i].tokens, sampling.logprobs)
                )
        self.on_expand()
        return [steps[i] for i in range(len(branches))]

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """The reward that ``score_of`` gives to each path."""
        if self.down:
            raise EngineDown("the engine is down")
        await self._move("score")
        await asyncio.sleep(0)
        self.scored.append(list(trajectories))
        self._charge(tree, prm_tokens=len(trajectories))
        self.on_score()
        return [self.score_of(t.texts) for t in trajectories]

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """The embedding that ``vector_of`` gives to each path's last step."""
        if self.down:
            raise EngineDown("the engine is down")
        await self._move("embed")
        await asyncio.sleep(0)
        self.embedded.append(list(trajectories))
        self.on_embed()
        return [tuple(self.vector_of(t.texts[-1])) for t in trajectories]

    def hint(self, tree: str, hint: Hint) -> None:
        """Record the hint."""
        self.hints.append(hint)

    async def release(self, tree: str) -> Counters:
        """Forget the tree and return its cost: a token a branch or path, one model call a call."""
        self.live.discard(tree)
        self.released.append(tree)
        await self._move("release")
        return self.costs.pop(tree, Counters())

    async def abort(self, tree: str) -> Counters:
        """Forget the tree and return its cost."""
        self.live.discard(tree)
        self.aborted.append(tree)
        await self._move("abort")
        return self.costs.pop(tree, Counters())

    async def usage(self) -> Usage:
        """Nothing is held; ``running`` counts the trees in flight."""
        running = len(self.live)
        return Usage(kv_tokens_capacity=1 << 16, prm_kv_tokens_capacity=1 << 16, running=running)

    async def health(self) -> None:
        """Raise EngineDown once the engine is down."""
        if self.down:
            raise EngineDown("the engine is down")

    async def close(self) -> None:
        """Record that the engine was closed."""
        self.closed = True

    async def _move(self, call: str) -> None:
        """Hang for ever if ``still`` has the call."""
        if call in self.still:
            self.waiting.set()
            await asyncio.Event().wait()

    def _charge(self, tree: str, decoded_tokens: int = 0, prm_tokens: int = 0) -> None:
        cost = self.costs.get(tree, Counters())
        self.costs[tree] = replace(
            cost,
            decoded_tokens=cost.decoded_tokens + decoded_tokens,
            prm_tokens=cost.prm_tokens + prm_tokens,
            model_calls=cost.model_calls + 1,
        )


async def grow(
    engine: ScriptedEngine, spec: SearchSpec, *, prompt: str = "Q", **more: Any
) -> Outcome:
    """Run a search with a clock that stands still; ``more``: other arguments of ``search``."""
    options = {"answer_of": answer_of, "clock": lambda: 0.0} | more
    return await search(Problem(encode(prompt), "Q"), spec, engine, tree_id="t", **options)
