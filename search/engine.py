"""What the search needs of an engine. Engines implement it in ``runtime``; nothing here runs.

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
    """What changes the odds of tokens beside temperature and top-p: vLLM's parameters, as there.

    ``top_k``: so many likeliest tokens are left, all where it is below 1; ``min_p``: those with at
    least this times the likeliest one's probability. ``logit_bias``: added to the logits of these
    ids. ``min_tokens``: no end token before so many of the output. ``repetition_penalty`` divides
    the positive logits of what the prompt and the output hold, and multiplies the negative ones;
    ``presence_penalty`` is taken off what the output holds, ``frequency_penalty`` each time. The
    output is a trajectory's, from its prompt on.
    """

    top_k: int = 0
    min_p: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0

    def asked(self) -> tuple[str, ...]:
        """The names of those that ask for something."""
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
    ``logits``: what else changes the odds; ``prompt_tokens``: so many tokens of every prefix are
    the prompt, the others are output. ``logprobs``: of each token drawn tell its log-probability
    and those of so many likeliest ones; None: of none. ``grammar``: a JSON schema's canonical
    text, which the output fits: no token after which it could not, no end before it does.
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
        """How many of the at most ``most`` tokens after ``path`` others may not end the output, by
        ``logits.min_tokens``."""
        return max(0, min(self.logits.min_tokens + self.prompt_tokens - path, most))


@dataclass(frozen=True, slots=True)
class Ahead:
    """What may be drawn below a branch before a round asks for it, where places are idle.

    The first ``children`` of the branch's node, the likelier the more of them (``potentials`` in
    ``search.tree_builder``). ``seed``: the request's; ``path``: the node's, child indices from the
    root; ``room``: most tokens of the branch's step and its child's together. ``steps``: so many
    steps will follow, each the first child of the one before, unless that ends the trajectory: what
    the search asks for whatever rewards say; 0 where that is not so.
    """

    seed: int
    path: tuple[int, ...]
    children: int
    room: int
    steps: int = 0

    def chain_seeds(self) -> list[int]:
        """The noise seeds of the steps that will follow."""
        return [step_seed(self.seed, (*self.path, *[0] * n)) for n in range(1, self.steps + 1)]

    def child_seed(self, child: int) -> int:
        """The noise seed that the round will give this child."""
        return step_seed(self.seed, (*self.path, child))


@dataclass(frozen=True, slots=True)
class Branch:
    """One child to draw.

    ``parent`` is the node forked from, ``child`` the child's index among its siblings, ``tokens``
    the whole prefix (prompt and steps down to the parent), ``seed`` the child's 64-bit noise
    seed, ``limit`` the most tokens this step may have (at most ``Sampling.max_step_tokens``),
    ``node`` the id the child gets if it is committed: hints speak of it by this id. ``ahead``:
    what may follow it; an engine need not look at it.
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
        """The node that it may become, and its parent."""
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
        """Whether it gets the other one's step, by the same sampling."""
        return (self.seed, self.limit, self.tokens) == (other.seed, other.limit, other.tokens)


class TokenLogprob(NamedTuple):
    """How likely a token was that was drawn, by its natural log-probability, and the likeliest ones
    there, by falling log-probability, equals by id: all by the model's own distribution, at
    temperature 1 and before anything changes the odds."""

    logprob: float
    top: tuple[tuple[int, float], ...]


@dataclass(frozen=True, slots=True)
class Step:
    """What was drawn for a branch. Fields as on ``search.tree.Node``; finish: STEP, END, LENGTH.

    ``attention``: how much of its due each step of the path, the prompt first and this one last,
    gets of the attention at its end, in [0, 1]; empty where nobody reads it. ``logprob`` and
    ``entropy`` are None where the engine does not know them. ``logprobs``: one a token, where the
    sampling asks for them.
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
        """Raises EngineError unless it has a step and none is empty."""
        if not self.steps or not all(self.steps):
            raise EngineError(f"steps: node {self.node} has an empty one or none")


@dataclass(frozen=True, slots=True)
class Hint:
    """What the KV manager should know. Values by node id in [0, 1]; ids of the same tree.

    ``outlook``: leaves that may be expanded later, in the order in which the search would turn to
    them if no reward changed; empty if it cannot say.
    """

    values: Mapping[int, float] = field(default_factory=dict)
    active: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    outlook: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class KvMoved:
    """What the KV of one tree went through since the last look.

    ``held``: unique tokens that the engine holds for it now, of ``capacity`` in all. ``cached``: of
    each node that lost KV to make room, or got it back: how many tokens of the path from the
    prompt's start to the node's end are cached. Nodes that are dead are not spoken of.
    """

    held: int
    capacity: int
    cached: Mapping[int, int] = field(default_factory=dict)

    def after(self, earlier: KvMoved | None) -> KvMoved:
        """This one and an earlier one at which nobody has looked."""
        if earlier is None:
            return self
        return KvMoved(self.held, self.capacity, {**earlier.cached, **self.cached})


class EngineError(Exception):
    """The engine failed a call; the message is fit for a client.

    EngineError
     ├─ EngineDown         the engine's process or server is gone; it may come back
     ├─ PrefixTooLong      a prefix and its step do not fit the context or the KV budget
     ├─ KvFull             all KV is held for searches and none may be given up
     ├─ RewardMissing      a trajectory got no reward; names the format and what it looked for
     ├─ VerifierFailed     the operator's verifier gave no numbers of use, or none in time
     ├─ EmbeddingMissing   the embedder gave no vectors of use; what is drawn and scored is well
     └─ CallFault          the engine failed at this call and let go of its tree; others go on
    """


class EngineDown(EngineError):
    """The engine's process or server is gone; it may come back."""


class KvFull(EngineError):
    """All KV is held for searches and none may be given up; the tree has lost its own."""


class PrefixTooLong(EngineError):
    """A prefix and its step do not fit the context or the KV budget."""


class RewardMissing(EngineError):
    """A trajectory got no reward."""


class VerifierFailed(EngineError):
    """The operator's verifier gave no numbers of use, or none in time."""


class EmbeddingMissing(EngineError):
    """The embedder gave no vectors of use; what is drawn and scored is well."""


class CallFault(EngineError):
    """The engine failed at this call and let go of its tree; others go on."""


Reproducible = Literal["exact", "seeded", "no"]
"""``exact``: bit for bit; ``seeded``: but for rounding; ``no``: draws are fresh ones,
or a verifier may judge a step differently the next time."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, said aloud.

    ``scores``: it gives rewards; ``outcome``: to finished replies alone, not to steps;
    ``likelihood``: these are its policy's log-probabilities, which steps drawn elsewhere have not.
    ``logits_params``: the ``LogitsParams`` that it honours over whole trajectories, by name.
    ``logprobs``: whether it tells those that ``Sampling.logprobs`` asks for; ``grammar``: whether
    it holds to ``Sampling.grammar``; ``grammar_at_once``: in one call from the prompt on alone.
    ``exact``: same seed, same tree, bit for bit. ``seeded``: tokens follow from the branches'
    seeds, up to rounding where the engine is not exact. ``embeds``: what embeds steps (``hidden``,
    ``lexical``, ``encoder`` or ``endpoint``); None if nothing does. ``score_tokens``: what scoring
    a path takes of its context beside its own tokens, once and for every step; ``scored_tokens``:
    that context, 0: ``context_tokens``. ``threads``: of its arithmetic, 0 where they are not its to
    choose; ``kernel``: what computes attention, empty likewise. ``step_logprobs``: steps have
    log-probabilities. ``most_temperature``: the highest one that it draws at.
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
    """Draws steps, scores trajectories and keeps their KV. ``tree`` is a caller-chosen unique id;
    what stands before its last slash names a cache namespace: cached tokens serve their own alone.

    All methods may raise EngineError. Cancelling an awaiting caller frees nothing: call ``abort``.
    """

    @property
    def capabilities(self) -> Capabilities:
        """What this engine can do; constant while it lives."""
        ...

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw one step for each branch; results in the order asked, whatever the order run."""
        ...

    async def score(
        self,
        tree: str,
        prompt: tuple[int, ...],
        question: str,
        trajectories: Sequence[Trajectory],
    ) -> list[float]:
        """One reward in [0, 1] a trajectory, unrounded. ``question`` is the user's own text."""
        ...

    async def embed(
        self, tree: str, prompt: tuple[int, ...], trajectories: Sequence[Trajectory]
    ) -> list[tuple[float, ...]]:
        """One vector, all of one size, for the last step of each trajectory, read alone.

        Raises EmbeddingMissing if the embedder is at fault and nothing else.
        """
        ...

    def hint(self, tree: str, hint: Hint) -> None:
        """Tell the KV manager about a tree. Never waits, never fails."""
        ...

    async def release(self, tree: str) -> Counters:
        """Stop what is under way for a tree, let go of its KV (it may stay cached); its cost."""
        ...

    async def abort(self, tree: str) -> None:
        """Stop everything under way for a tree and let go of its KV."""
        ...

    async def usage(self) -> Usage:
        """KV and queues now."""
        ...

    async def health(self) -> None:
        """Return when the engine is alive and making progress; raise EngineDown if it is not."""
        ...

    async def close(self) -> None:
        """Stop the engine."""
        ...


@runtime_checkable
class TellsKv(Protocol):
    """An engine that can say what became of a tree's KV, for who watches."""

    def kv_moved(self, tree: str) -> KvMoved | None:
        """What happened since the last look; None if nothing was said. Never waits or fails."""
        ...
