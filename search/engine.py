"""The interface that a search needs of an engine. ``runtime`` implements it; nothing here runs.

An engine owns one KV cache for all trees of all requests. The search names prefixes by token ids
and nodes by (tree, id); it never says what to cache, it only hints.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Literal, NamedTuple, Protocol, runtime_checkable

from search.counters import Counters, Usage
from search.tree import Finish, step_seed


@dataclass(frozen=True, slots=True)
class LogitsParams:
    """Sampling parameters beside temperature and top-p, with vLLM's names and meanings.

    ``top_k``: keep this many likeliest tokens, all if below 1; ``min_p``: keep those with at least
    this share of the likeliest one's probability. ``logit_bias``: added to the logits of these ids.
    ``min_tokens``: no end token before this many output tokens. ``repetition_penalty`` divides the
    positive logits of tokens in the prompt or the output, and multiplies the negative ones;
    ``presence_penalty`` is subtracted once for a token in the output, ``frequency_penalty`` for
    each of its occurrences. The output is a whole trajectory's, from its prompt on.
    """

    top_k: int = 0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def active(self) -> tuple[str, ...]:
        """The names of the parameters that change the sampling."""
        names = [field.name for field in fields(self) if getattr(self, field.name) != field.default]
        return tuple(name for name in names if name != "top_k" or self.top_k > 0)


NEUTRAL = LogitsParams()
LOGITS_PARAMS = tuple(parameter.name for parameter in fields(NEUTRAL))


@dataclass(frozen=True, slots=True)
class Sampling:
    """How steps are drawn.

    ``temperature`` 0 is greedy. ``top_p`` in (0, 1] truncates after the temperature. A step ends at
    the first ``stop`` string (kept in the step), at the model's end token, or after
    ``max_step_tokens`` tokens; an empty ``stop`` makes steps of exactly that many tokens.
    ``logits``: further parameters; ``prompt_tokens``: the prompt's length, the rest of every prefix
    is output. ``logprobs``: report each drawn token's log-probability and those of this many
    likeliest ones; None: report none. ``grammar``: the canonical text of a JSON schema that the
    output must match: no token that rules a match out, and no end before it matches.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    stop: tuple[str, ...] = ("\n\n",)
    max_step_tokens: int = 256
    logits: LogitsParams = NEUTRAL
    prompt_tokens: int = 0
    logprobs: int | None = None
    grammar: str | None = None

    def min_tokens_left(self, path: int, most: int) -> int:
        """After ``path`` tokens of prompt and output, how many of the next ``most`` tokens must not
        end the output, by ``logits.min_tokens``."""
        return max(0, min(self.logits.min_tokens + self.prompt_tokens - path, most))


@dataclass(frozen=True, slots=True)
class Ahead:
    """What an engine may draw below a branch before a round asks for it, if it has idle slots.

    ``children``: how many first children of the branch's node, more where they are more likely to
    be needed (``potentials`` in ``search.tree_builder``). ``seed``: the request's; ``path``: the
    node's, child indices from the root; ``room``: most tokens of the branch's step and its child's
    together. ``steps``: how many steps are sure to follow, regardless of rewards, each the first
    child of the one before, until one ends the trajectory; 0 if rewards decide.
    """

    seed: int
    path: tuple[int, ...]
    children: int
    room: int
    steps: int = 0

    def chain_seeds(self) -> list[int]:
        """The noise seeds of the ``steps`` that are sure to follow."""
        return [step_seed(self.seed, (*self.path, *[0] * n)) for n in range(1, self.steps + 1)]

    def child_seed(self, child: int) -> int:
        """The noise seed that a round will give this child."""
        return step_seed(self.seed, (*self.path, child))


@dataclass(frozen=True, slots=True)
class Branch:
    """One child to draw.

    ``parent`` is the node forked from, ``child`` the child's index among its siblings, ``tokens``
    the whole prefix (prompt and steps down to the parent), ``seed`` the child's 64-bit noise
    seed, ``limit`` the most tokens this step may have (at most ``Sampling.max_step_tokens``),
    ``node`` the id the child gets if it is committed, by which hints name it. ``ahead``: what
    may be drawn after it; an engine may ignore it.
    """

    parent: int
    child: int
    tokens: tuple[int, ...]
    seed: int
    limit: int
    node: int
    ahead: Ahead | None = None

    @property
    def step(self) -> tuple[int, int]:
        """The id of the node that it may become, and its parent's."""
        return self.node, self.parent

    def early_limit(self, length: int, most: int) -> int:
        """The most tokens of a child's step if this one has ``length``, never above ``most``.

        Below 1 where no token of it may be drawn before a round asks for the child.
        """
        return 0 if self.ahead is None else min(most, self.ahead.room - length)

    def early_child(self, child: int, output: Sequence[int], most: int) -> Branch:
        """The branch that a round would ask for below this one's step ``output``; node: -1."""
        assert self.ahead is not None, "no child may be drawn early"
        limit = self.early_limit(len(output), most)
        tokens, seed = (*self.tokens, *output), self.ahead.child_seed(child)
        return Branch(self.node, child, tokens, seed, limit, -1)

    def draws_as(self, other: Branch) -> bool:
        """Whether both draw the same step, given the same sampling."""
        return (self.seed, self.limit, self.tokens) == (other.seed, other.limit, other.tokens)


class TokenLogprob(NamedTuple):
    """A drawn token's natural log-probability, and the likeliest tokens in its place by falling
    log-probability, equal ones by id: all under the model's own distribution, at temperature 1 and
    before other sampling parameters apply."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """The step drawn for a branch. Fields as on ``search.tree.Node``; finish: STEP, END, LENGTH.

    ``attention``: for each step of the path, the prompt first and this one last, how much attention
    it gets at this step's end, in [0, 1], 0.5 being as much as an even spread gives; empty if not
    measured. ``logprob`` and ``entropy`` are None if the engine does not know them. ``logprobs``:
    one for each token, if the sampling asks for them.
    """

    tokens: tuple[int, ...]
    text: str
    finish: Finish
    logprob: float | None
    entropy: float | None
    attention: tuple[float, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Trajectory:
    """A path to score: the steps' ids and texts from below the root to ``node``.

    ``seed``: 64-bit noise seed for reward formats that draw, such as an LLM judge's verdicts.
    """

    node: int
    steps: tuple[tuple[int, ...], ...]
    texts: tuple[str, ...]
    seed: int = 0

    def check_steps(self) -> None:
        """Raise EngineError if there is no step or an empty one."""
        if not self.steps or not all(self.steps):
            raise EngineError(f"steps: node {self.node} has an empty one or none")


@dataclass(frozen=True, slots=True)
class Hint:
    """What a search tells the KV manager about the nodes of one tree, by their ids.

    ``values``: new rewards, in [0, 1]. ``active``: nodes about to grow. ``outlook``: leaves that
    may be expanded later, in the search's order if no reward changed; empty if it has none.
    """

    values: Mapping[int, float] = field(default_factory=dict)
    active: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    outlook: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KvMoved:
    """How the KV of one tree changed since the last call.

    ``held``: unique tokens that the engine holds for it now, of ``capacity`` in all. ``cached``:
    for each node that lost KV to make room, or got it back, how many tokens of the path from the
    prompt's start to the node's end are cached. Dead nodes are left out.
    """

    held: int
    capacity: int
    cached: Mapping[int, int] = field(default_factory=dict)

    def after(self, earlier: KvMoved | None) -> KvMoved:
        """Merge with ``earlier`` changes that nobody has read."""
        if earlier is None:
            return self
        return KvMoved(self.held, self.capacity, {**earlier.cached, **self.cached})


class EngineError(Exception):
    """The engine failed a call; the message is fit for a client.

    EngineError
     ├─ EngineDown         the engine's process or server is gone; it may come back
     ├─ PrefixTooLong      a prefix and its step do not fit the context or the KV budget
     ├─ KvFull             all KV is held for searches and none may be evicted
     ├─ RewardMissing      a trajectory got no reward; names the format and what it looked for
     ├─ VerifierFailed     the operator's verifier gave no usable numbers, or none in time
     ├─ EmbeddingMissing   the embedder gave no usable vectors; drawing and scoring still work
     └─ CallFault          the engine failed at this call and released its tree; others go on
    """


class EngineDown(EngineError):
    """The engine's process or server is gone; it may come back."""


class KvFull(EngineError):
    """All KV is held for searches and none may be evicted; the tree has lost its own."""


class PrefixTooLong(EngineError):
    """A prefix and its step do not fit the context or the KV budget."""


class RewardMissing(EngineError):
    """A trajectory got no reward."""


class VerifierFailed(EngineError):
    """The operator's verifier gave no usable numbers, or none in time."""


class EmbeddingMissing(EngineError):
    """The embedder gave no usable vectors; drawing and scoring still work."""


class CallFault(EngineError):
    """The engine failed at this call and released its tree; other trees go on."""


Reproducible = Literal["exact", "seeded", "no"]
"""The same seed gives the same tree: ``exact``: bit for bit; ``seeded``: up to rounding; ``no``:
draws are not seeded, or a verifier may judge a step differently the next time."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do.

    ``scores``: it gives rewards; ``outcome``: for finished replies alone, not for steps;
    ``likelihood``: they are its policy's log-probabilities, which it lacks for steps drawn
    elsewhere. ``logits_params``: the ``LogitsParams`` that it honours over whole trajectories, by
    name. ``logprobs``: it reports what ``Sampling.logprobs`` asks for; ``grammar``: it enforces
    ``Sampling.grammar``; ``grammar_at_once``: but only in one call from the prompt on. ``exact``:
    same seed, same tree, bit for bit. ``seeded``: tokens follow from the branches' seeds, up to
    rounding if the engine is not exact. ``embeds``: what embeds steps (``hidden``, ``lexical``,
    ``encoder`` or ``endpoint``); None if nothing does. ``score_tokens``: the context that scoring
    takes beside a path's tokens, once and for every step; ``scored_tokens``: the reward model's
    context, 0: ``context_tokens``. ``threads``: of its arithmetic, 0 if it does not choose them;
    ``kernel``: what computes attention, empty if it does not choose it. ``step_logprobs``: steps
    have log-probabilities. ``most_temperature``: the highest temperature that it can sample at.
    """

    engine: str
    models: Mapping[str, str]
    exact: bool
    scores: bool
    embeds: str | None
    context_tokens: int
    fingerprint: str
    score_tokens: tuple[int, int] = (0, 1)
    scored_tokens: int = 0
    seeded: bool = True
    threads: int = 0
    kernel: str = ""
    outcome: bool = False
    likelihood: bool = False
    step_logprobs: bool = True
    logits_params: tuple[str, ...] = ()
    logprobs: bool = False
    most_temperature: float = math.inf
    grammar: bool = False
    grammar_at_once: bool = False

    @property
    def reproducible(self) -> Reproducible:
        """How far the same seed gives the same tree."""
        if self.exact:
            return "exact"
        return "seeded" if self.seeded else "no"


class Engine(Protocol):
    """Draws steps, scores trajectories and keeps their KV. ``tree`` is a unique id that the
    caller chooses; the part before its last slash names a cache namespace, which shares no tokens.

    All methods may raise EngineError. Cancelling an awaiting caller frees nothing: call ``abort``.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; constant while it lives."""
        ...

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch; returned in the order of ``branches``."""
        ...

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One unrounded reward in [0, 1] for each trajectory. ``question``: the user's own text."""
        ...

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """One vector, all of one size, for the last step of each trajectory, read by itself.

        Raises EmbeddingMissing if only the embedder failed.
        """
        ...

    def hint(self, tree: str, hint: Hint) -> None:
        """Tell the KV manager about a tree. Never waits, never fails."""
        ...

    async def release(self, tree: str) -> Counters:
        """Stop all work for a tree, release its KV (it may stay cached) and return its cost."""
        ...

    async def abort(self, tree: str) -> Counters:
        """``release`` a tree that is given up: its pending calls raise EngineError."""
        ...

    async def usage(self) -> Usage:
        """The current sizes of KV and queues."""
        ...

    async def health(self) -> None:
        """Return when the engine is alive and making progress; raise EngineDown if it is not."""
        ...

    async def close(self) -> None:
        """Stop the engine."""
        ...


@runtime_checkable
class TellsKv(Protocol):
    """An engine that reports how a tree's KV changes, for the events of a search."""

    def kv_moved(self, tree: str) -> KvMoved | None:
        """The changes since the last call; None if none were reported. Never waits or fails."""
        ...
