"""The loop that grows a tree: plan, expand, score, grow, until there is an answer to vote for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import TypeVar

from search.counters import Counters
from search.embedding import Embeddings
from search.engine import (
    Capabilities,
    EmbeddingMissing,
    Engine,
    EngineError,
    KvFull,
    KvMoved,
    PrefixTooLong,
    RewardMissing,
    TellsKv,
    Trajectory,
)
from search.events import Answered, Event, Started
from search.outcome import Outcome
from search.outcome_rewards import outcome_refusal
from search.policies.policy import (
    AnswerPolicy,
    EmbeddingPolicy,
    Policy,
    Round,
    Scores,
)
from search.policies.registry import POLICIES, returns_to_root
from search.problem import Problem
from search.reward_needs import reward_needs
from search.spec import SearchSpec, StopReason
from search.stats import KvEvents, LogicalKV, Tally
from search.stop import Deadline, TooLate, budget_met, consensus_met, why_done
from search.tree import ROOT, Node, Tree, tree_digest
from search.tree_builder import PendingNode, TreeBuilder
from search.vote import AnswerClasses, cut_short, hold_vote, vote_name

T = TypeVar("T")

Answers = Mapping[str, Sequence[Node]]
"""Finished trajectories by answer."""

UNCOMPARED = "(answers told apart by their spelling: the deadline came)"
ABORT_SECONDS = 1.0
"""Most seconds to wait for an engine to abort a tree whose search failed or was cancelled."""


async def within(seconds: float | None, work: Awaitable[T]) -> T:
    """Await ``work`` for at most ``seconds`` (None: no limit). Raises TooLate if it takes longer.

    A coroutine is always started: with 0 seconds it runs up to its first wait.
    """
    timer = asyncio.timeout(seconds)
    try:
        async with timer:
            return await work
    except TimeoutError:
        if not timer.expired():
            raise
        raise TooLate from None


async def search(
    problem: Problem,
    spec: SearchSpec,
    engine: Engine,
    *,
    tree_id: str,
    answer_of: Callable[[str], str | None],
    clock: Callable[[], float],
    same_answer: Callable[[str, str], bool] | None = None,
    deadline: float | None = None,
    listen: Callable[[Event], None] | None = None,
    context_tokens: int | None = None,
    policy_of: Callable[[SearchSpec], Policy] | None = None,
) -> Outcome:
    """Search for an answer to ``problem`` as ``spec`` says.

    ``tree_id``: unique among the engine's trees. ``answer_of``: returns a reply's answer in
    canonical form, or None; ``same_answer``: whether two answers with different spellings are equal
    (by default none are), called in a thread. ``clock``: seconds; ``deadline``: a time by it, when
    the round under way is dropped whole. ``listen`` gets every event. ``context_tokens``: most
    tokens of prompt and reply, by default the engine's context. ``policy_of``: default: the spec's.

    The same problem, spec and model give the same tree, regardless of other searches, unless the
    deadline cuts it short. Cancelling the awaiting task ends a search early. The engine's tree is
    released, or aborted after an error or a cancellation. Nothing is awaited for more than
    CLOSING_SECONDS past the deadline: see SearchStats and UNCOMPARED. Raises ValueError (no seed),
    PrefixTooLong, RewardMissing and any other EngineError that is raised while the tree grows.
    """
    if spec.seed is None:
        raise ValueError("seed: None; the caller must draw one, an integer from 0 to 2**63 - 1")
    emit = listen or (lambda _: None)
    context = context_tokens or engine.capabilities.context_tokens
    if len(problem.prompt) >= context:
        raise PrefixTooLong(f"prompt: {len(problem.prompt)} tokens; the context holds {context}")
    policy, scores = _policy(spec, engine.capabilities, policy_of or POLICIES[spec.policy])
    tree, until = Tree(problem.prompt), Deadline(clock, deadline)
    run = _SearchLoop(
        problem=problem,
        spec=spec,
        engine=engine,
        tree_id=tree_id,
        policy=policy,
        builder=TreeBuilder(tree, spec, policy, problem.delimiter, context, scores, emit),
        classes=AnswerClasses(answer_of, until.bound(same_answer)),
        spelled=AnswerClasses(answer_of),
        until=until,
        kv_events=None if listen is None else KvEvents(tree, listen),
        kv_moved=engine.kv_moved if isinstance(engine, TellsKv) else None,
    )
    emit(Started(tree_id, spec.policy, spec.width, spec.seed, problem.prompt))
    stop, cost, answers = await run.to_the_end()
    return run.outcome(stop, cost, answers, emit)


def _policy(
    spec: SearchSpec, capabilities: Capabilities, policy_of: Callable[[SearchSpec], Policy]
) -> tuple[Policy, Scores]:
    """Return the policy, fitted to the engine's embedder, and which nodes need a reward."""
    policy = policy_of(spec)
    if isinstance(policy, EmbeddingPolicy):
        policy = policy.suited_to(capabilities.embeds)
    scores = max({**reward_needs(spec), "policy": policy.scores}.values())
    if scores is not Scores.NONE and not capabilities.scores:
        need = f"policy {spec.policy} with vote {vote_name(spec)} needs one"
        raise RewardMissing(f"engine {capabilities.engine} has no reward model; {need}")
    if capabilities.outcome and (refused := outcome_refusal(spec)) is not None:
        raise RewardMissing("search.{}: {}".format(*refused))
    return policy, scores


def check_rewards(rewards: Sequence[float], expected: int, capabilities: Capabilities) -> None:
    """Raise RewardMissing unless an engine gave ``expected`` rewards in [0, 1]."""
    valid = [reward for reward in rewards if 0.0 <= reward <= 1.0]
    if len(valid) != expected:
        engine = f"engine {capabilities.engine} ({dict(capabilities.models)})"
        raise RewardMissing(
            f"{engine} gave {len(valid)} rewards in [0, 1] for {expected} trajectories"
        )


@dataclass(slots=True)
class _SearchLoop:
    """One running search.

    ``classes`` sorts answers by equality, ``spelled`` by their spelling alone.
    """

    problem: Problem
    spec: SearchSpec
    engine: Engine
    tree_id: str
    policy: Policy
    builder: TreeBuilder
    classes: AnswerClasses
    spelled: AnswerClasses
    until: Deadline
    kv_events: KvEvents | None
    kv_moved: Callable[[str], KvMoved | None] | None
    embeddings: Embeddings | None = field(init=False)
    tally: Tally = field(init=False)
    start: float = field(init=False)

    def __post_init__(self) -> None:
        """Set up embeddings and counts, and start the clock."""
        compares = isinstance(self.policy, EmbeddingPolicy)
        self.embeddings = Embeddings(self.builder.tree) if compares else None
        self.tally = Tally(LogicalKV(len(self.problem.prompt)), self.policy)
        self.start = self.until.clock()

    async def to_the_end(self) -> tuple[StopReason, Counters | None, Answers]:
        """Grow the tree, then release it while answers are compared; abort it on any exception."""
        try:
            stop = await self.grow()
            return stop, *await asyncio.gather(self.release(), self.voters())
        except BaseException:
            with suppress(EngineError, TooLate):
                seconds = self.until.closing(ABORT_SECONDS)
                await within(seconds, self.engine.abort(self.tree_id))
            raise

    async def release(self) -> Counters | None:
        """Release the engine's tree and return its cost; None if the engine is late or fails.

        The tree is complete by now, so that an engine which fails here costs no answer.
        """
        try:
            return await within(self.until.releasing(), self.engine.release(self.tree_id))
        except (EngineError, TooLate):
            return None

    async def grow(self) -> StopReason:
        """Run rounds until the policy is done, a budget is met or the deadline passes."""
        try:
            return await self.rounds()
        except TooLate:
            return StopReason.DEADLINE

    async def rounds(self) -> StopReason:
        """Do the work of ``grow``. Raises TooLate at the deadline, dropping the round under way."""
        tree = self.builder.tree
        while True:
            await self.embed()
            plan = await within(self.until.remaining(), self.plan())
            if plan is None:
                return why_done(tree, self.spec, self.policy)
            reason = budget_met(tree, self.spec, lambda: self.tally.held_tokens(tree))
            if reason is not None:
                return reason
            if self.spec.consensus and await self.settled(plan):
                return StopReason.CONSENSUS
            self.hint(plan)
            self.until.check()
            try:
                children_due = await within(self.until.remaining(), self.expand(plan))
            except KvFull:
                return StopReason.KV
            self.until.check()
            children = self.builder.commit(*children_due)
            self.tally.round(tree, children, self.until.clock() - self.start)
            self.tell_kv(plan)
            if len(children) < sum(plan.expand.values()):
                return StopReason.MAX_TOKENS

    def hint(self, plan: Round) -> None:
        """Begin a round: send the engine its hint, and listeners the KV events of dead nodes."""
        hint = self.builder.select(plan)
        self.engine.hint(self.tree_id, hint)
        if self.kv_events is not None:
            self.kv_events.dead(self.builder.round, hint.dead)

    def tell_kv(self, plan: Round) -> None:
        """Emit this round's KV events, if there is a listener and the engine reports its KV."""
        if self.kv_events is None or self.kv_moved is None:
            return
        changes = self.kv_moved(self.tree_id)
        if changes is not None:
            self.kv_events.round(self.builder.round, changes, self.tally.kv.tokens(plan.expand))

    async def settled(self, plan: Round) -> bool:
        """Whether the finished trajectories have agreed, so that the round is not needed.

        A policy that returns to the root may grow a whole new path from there.
        """
        tree = self.builder.tree
        growing = {leaf.id for leaf in tree.leaves()} - set(plan.prune)
        if returns_to_root(self.policy):
            growing.add(ROOT)
        return consensus_met(tree, self.spec, await self.answers(self.until.remaining()), growing)

    async def answers(self, seconds: float | None) -> Answers:
        """The finished trajectories by answer. Raises TooLate if comparing them takes more than
        ``seconds``; from then on the spelling decides."""
        classes, tree = self.classes, self.builder.tree
        if not classes.compares:
            return classes.of(tree)
        try:
            return await within(seconds, asyncio.to_thread(classes.of, tree))
        except TooLate:
            self.classes = self.spelled
            raise

    async def voters(self) -> Answers:
        """The finished trajectories by answer, sorted by spelling if comparing takes too long."""
        try:
            return await self.answers(self.until.closing())
        except TooLate:
            return self.spelled.of(self.builder.tree)

    async def plan(self) -> Round | None:
        """Ask the policy for its next round, and count the time and the fall-backs."""
        policy, tree = self.policy, self.builder.tree
        reads_answers = isinstance(policy, AnswerPolicy)
        answers = await self.answers(self.until.remaining()) if reads_answers else {}
        start, fell_back = self.until.clock(), False
        if self.embeddings is not None and isinstance(policy, EmbeddingPolicy):
            fell_back = bool(self.embeddings.unknown(policy.to_embed(tree)))
            planner = policy.uncompared if fell_back else policy.plan
            plan = await asyncio.to_thread(planner, tree)
        elif isinstance(policy, AnswerPolicy):
            plan = policy.plan_knowing(tree, answers)
        else:
            plan = policy.plan(tree)
        self.tally.policy_seconds += self.until.clock() - start
        if plan is not None:
            self.tally.embedder_fallbacks += fell_back
            self.tally.solver_fallbacks += plan.fell_back
        return plan

    async def embed(self) -> None:
        """Put the embeddings that the next plan reads on their nodes. Raises TooLate."""
        if self.embeddings is None or not isinstance(self.policy, EmbeddingPolicy):
            return
        nodes = self.policy.to_embed(self.builder.tree)
        unknown = self.embeddings.unknown(nodes)
        if self.asks(unknown):
            self.until.check()
            await within(self.until.remaining(), self.learn(unknown, self.embeddings))
            self.until.check()
        self.embeddings.store(nodes)

    def asks(self, unknown: Sequence[Trajectory]) -> bool:
        """Whether to call the embedder: there is something to embed, and it has not failed yet.

        After a failure it is not called again, as the search would wait for it in every round.
        """
        return bool(unknown) and self.tally.embedder_fault is None

    async def learn(self, unknown: Sequence[Trajectory], embeddings: Embeddings) -> None:
        """Embed steps, or record why the embedder failed."""
        try:
            vectors = await self.engine.embed(self.tree_id, self.problem.prompt, unknown)
            embeddings.take(unknown, vectors)
        except EmbeddingMissing as error:
            self.tally.embedder_fault = str(error)

    async def expand(self, plan: Round) -> tuple[list[PendingNode], dict[int, float]]:
        """Return a round's steps and rewards. Once the policy has compared steps it will compare
        these too, so they are embedded while they are scored."""
        branches = self.builder.branches(plan)
        steps = await self.engine.expand(self.tree_id, branches, self.builder.sampling)
        pending = self.builder.pending(branches, steps)
        embeddings = self.embeddings
        if embeddings is not None and not embeddings.empty:
            new_steps = embeddings.new(self.builder.to_compare(pending))
            if self.asks(new_steps):
                learn = self.learn(new_steps, embeddings)
                rewards, _ = await asyncio.gather(self.score(pending), learn)
                return pending, rewards
        return pending, await self.score(pending)

    async def score(self, pending: Sequence[PendingNode]) -> dict[int, float]:
        """Score each distinct path that needs a reward. Returns unrounded rewards by node id."""
        paths = self.builder.to_score(pending)
        if not paths:
            return {}
        problem = self.problem
        rewards = await self.engine.score(self.tree_id, problem.prompt, problem.question, paths)
        check_rewards(rewards, len(paths), self.engine.capabilities)
        return {path.node: r for path, r in zip(paths, rewards, strict=True)}

    def outcome(
        self,
        stop: StopReason,
        cost: Counters | None,
        answers: Answers,
        emit: Callable[[Event], None],
    ) -> Outcome:
        """Hold the vote, emit the last event and return the outcome."""
        tree = self.builder.tree
        ballot = hold_vote(tree, vote_name(self.spec), answers)
        if ballot.chosen is None and stop in (StopReason.MAX_TOKENS, StopReason.KV):
            ballot = cut_short(tree)
        if self.classes is self.spelled:  # say that the deadline changed the vote
            stop, ballot = StopReason.DEADLINE, replace(ballot, rule=f"{ballot.rule} {UNCOMPARED}")
        text = "" if ballot.chosen is None else tree.text(ballot.chosen)
        digest = tree_digest(tree, ballot.answer)
        emit(Answered(ballot.chosen, ballot.answer, text, ballot.rule, stop.value, digest))
        return Outcome(
            tree=tree,
            answer=ballot.answer,
            chosen=ballot.chosen,
            text=text,
            answers=ballot.answers,
            stop_reason=stop,
            vote=ballot.rule,
            stats=self.tally.stats(tree, ballot.chosen, self.until.clock() - self.start, cost),
            digest=digest,
            spec=self.spec,
            reproducible=self.engine.capabilities.reproducible,
        )
