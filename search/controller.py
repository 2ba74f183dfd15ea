"""The loop that grows a tree: plan, draw, score, grow, until there is an answer to vote for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TypeVar

from search.digest import tree_digest
from search.embedding import Embeddings
from search.engine import (
    Capabilities,
    EmbeddingMissing,
    Engine,
    EngineError,
    KvFull,
    PrefixTooLong,
    RewardMissing,
    TellsKv,
    Trajectory,
    TreeCost,
)
from search.events import Answered, Event, Started
from search.growth import Draft, Growth
from search.kv_story import KvStory
from search.logical_kv import LogicalKV
from search.outcome import Outcome
from search.policies.policy import (
    Backtracking,
    Comparing,
    Policy,
    Round,
    Scores,
    frontier_of,
    outlook_of,
)
from search.policies.registry import POLICIES
from search.spec import SearchSpec, StopReason
from search.stats import Tally
from search.stop import budget_met, consensus_met, why_done
from search.tree import ROOT, Node, Tree
from search.vote import VOTE_SCORES, AnswerClasses, hold_vote, vote_name

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """What is asked.

    ``prompt``: the policy model's token ids, chat template included. ``question``: the user's own
    words, for the reward model. ``delimiter``: what ends a step.
    """

    prompt: tuple[int, ...]
    question: str
    delimiter: str = "\n\n"

    def __post_init__(self) -> None:
        """Refuse a delimiter that no step could end with."""
        if not self.delimiter:
            raise ValueError("delimiter: empty; at least one character is needed")


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

    ``tree_id``: unique among the engine's trees. ``answer_of``: a reply's answer in canonical form,
    or None; ``same_answer``: whether two that are spelled differently are equal (by default none
    are), asked in a thread. ``clock``: seconds; ``deadline``: a time by it, at which the round
    under way is dropped whole. ``listen`` hears every event. ``context_tokens``: most tokens of
    prompt and reply, by default what the engine can hold. ``policy_of`` makes the policy, by
    default the one that the spec names.

    Same problem, spec and model: same tree, whatever else the engine does, unless the deadline cuts
    it short. Cancelling the awaiting task ends a search early. The engine's tree is released, or
    aborted if an error or a cancellation comes through. Raises ValueError (no seed), PrefixTooLong,
    RewardMissing and whatever other EngineError the engine raises.
    """
    if spec.seed is None:
        raise ValueError("seed: None; the caller must draw one, an integer from 0 to 2**63 - 1")
    emit = listen or (lambda _: None)
    context = context_tokens or engine.capabilities.context_tokens
    if len(problem.prompt) >= context:
        raise PrefixTooLong(f"prompt: {len(problem.prompt)} tokens; the context holds {context}")
    policy, scores = _policy(spec, engine.capabilities, policy_of or POLICIES[spec.policy])
    tree = Tree(problem.prompt)
    frontier = frontier_of(policy)
    growth = Growth(tree, spec, spec.seed, problem.delimiter, context, scores, emit, frontier)
    growth.outlook = outlook_of(policy)
    tally = Tally(LogicalKV(len(problem.prompt)), frontier)
    start = clock()
    known, classes = Embeddings(tree), AnswerClasses(answer_of, same_answer)
    run = _Run(
        problem,
        spec,
        engine,
        tree_id,
        policy,
        growth,
        tally,
        known,
        classes,
        clock,
        start,
        deadline,
        None if listen is None else KvStory(tree, listen),
    )
    emit(Started(tree_id, spec.policy, spec.width, spec.seed, problem.prompt))
    stop, cost = await run.to_the_end()
    return await run.outcome(stop, cost, emit)


def _policy(
    spec: SearchSpec, able: Capabilities, policy_of: Callable[[SearchSpec], Policy]
) -> tuple[Policy, Scores]:
    """The policy, suited to what the engine can do, and which nodes need a reward."""
    policy = policy_of(spec)
    if isinstance(policy, Comparing):
        policy = policy.suited_to(able.embeds)
    scores = max(policy.scores, VOTE_SCORES[vote_name(spec)])
    if scores is not Scores.NONE and not able.scores:
        needy = f"policy {spec.policy} with vote {vote_name(spec)} needs one"
        raise RewardMissing(f"engine {able.engine} has no reward model; {needy}")
    return policy, scores


@dataclass(slots=True)
class _Run:
    """One search under way."""

    problem: Problem
    spec: SearchSpec
    engine: Engine
    tree_id: str
    policy: Policy
    growth: Growth
    tally: Tally
    embeddings: Embeddings
    classes: AnswerClasses
    clock: Callable[[], float]
    start: float
    deadline: float | None
    story: KvStory | None

    async def to_the_end(self) -> tuple[StopReason, TreeCost]:
        """Grow, then let go of the engine's tree, whatever happens."""
        released = False
        try:
            stop = await self.grow()
            cost = await self.engine.release(self.tree_id)
            released = True
            return stop, cost
        finally:
            if not released:
                with suppress(EngineError):
                    await self.engine.abort(self.tree_id)

    async def grow(self) -> StopReason:
        """Round after round, until the policy is done or a budget is met."""
        tree = self.growth.tree
        while await self.embed():
            plan = await self.plan()
            if plan is None:
                return why_done(tree, self.spec, self.policy)
            if (met := budget_met(tree, self.spec, lambda: self.tally.held(tree))) is not None:
                return met
            if self.spec.consensus and await self.settled(plan):
                return StopReason.CONSENSUS
            self.hint(plan)
            try:
                drawn = await self.in_time(lambda plan=plan: self.draw(plan))
            except KvFull:
                return StopReason.KV
            if drawn is None:
                break
            children = self.growth.commit(*drawn)
            self.tally.round(tree, children, self.clock() - self.start)
            self.tell_kv(plan)
            if len(children) < sum(plan.expand.values()):
                return StopReason.MAX_TOKENS
        return StopReason.DEADLINE

    def hint(self, plan: Round) -> None:
        """Begin a round, and tell the engine and who watches its KV."""
        hint = self.growth.select(plan)
        self.engine.hint(self.tree_id, hint)
        if self.story is not None:
            self.story.dead(self.growth.round, hint.dead)

    def tell_kv(self, plan: Round) -> None:
        """Tell who watches what became of the KV in this round."""
        if self.story is None or not isinstance(self.engine, TellsKv):
            return
        moved = self.engine.kv_moved(self.tree_id)
        if moved is not None:
            self.story.round(self.growth.round, moved, self.tally.kv.tokens(plan.expand))

    async def settled(self, plan: Round) -> bool:
        """Whether the finished trajectories have agreed, so that the round is not needed.

        A policy that goes back may in the end grow any node, the root among them.
        """
        tree = self.growth.tree
        growing = {leaf.id for leaf in tree.leaves()} - set(plan.prune)
        if isinstance(self.policy, Backtracking):
            growing.add(ROOT)
        return consensus_met(tree, self.spec, await self.answers(), growing)

    async def answers(self) -> Mapping[str, Sequence[Node]]:
        """The finished trajectories by answer."""
        if self.classes.compares:
            return await asyncio.to_thread(self.classes.of, self.growth.tree)
        return self.classes.of(self.growth.tree)

    async def plan(self) -> Round | None:
        """The policy's next round, timed."""
        policy, tree = self.policy, self.growth.tree
        before, fell_back = self.clock(), False
        if isinstance(policy, Comparing):
            fell_back = bool(self.embeddings.unknown(policy.to_embed(tree)))
            planned = policy.uncompared if fell_back else policy.plan
            plan = await asyncio.to_thread(planned, tree)
        else:
            plan = policy.plan(tree)
        self.tally.policy_seconds += self.clock() - before
        if plan is not None:
            self.tally.embedder_fallbacks += fell_back
            self.tally.solver_fallbacks += plan.fell_back
        return plan

    async def in_time(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """What ``work`` comes to, or None if the deadline comes first."""
        left = None if self.deadline is None else self.deadline - self.clock()
        if left is not None and left <= 0:
            return None
        timer = asyncio.timeout(left)
        try:
            async with timer:
                done = await work()
        except TimeoutError:
            if not timer.expired():
                raise
            return None
        late = self.deadline is not None and self.clock() >= self.deadline
        return None if late else done

    async def embed(self) -> bool:
        """Put the embeddings that the policy will ask for on the nodes; False: too late."""
        if not isinstance(self.policy, Comparing):
            return True
        nodes = self.policy.to_embed(self.growth.tree)
        unknown = self.embeddings.unknown(nodes)
        if self.asks(unknown) and await self.in_time(lambda: self.learn(unknown)) is None:
            return False
        self.embeddings.store(nodes)
        return True

    def asks(self, unknown: Sequence[Trajectory]) -> bool:
        """Whether there is anything to embed.

        An embedder that has failed is not asked again: the search would wait for it every round.
        """
        return bool(unknown) and self.tally.embedder_fault is None

    async def learn(self, unknown: Sequence[Trajectory]) -> bool:
        """Have steps embedded; whether they were."""
        try:
            vectors = await self.engine.embed(self.tree_id, self.problem.prompt, unknown)
            self.embeddings.take(unknown, vectors)
        except EmbeddingMissing as error:
            self.tally.embedder_fault = str(error)
            return False
        return True

    async def draw(self, plan: Round) -> tuple[list[Draft], dict[int, float]]:
        """A round's steps and rewards. A policy that has compared steps will compare these: they
        are embedded while they are scored."""
        branches = self.growth.branches(plan)
        steps = await self.engine.expand(self.tree_id, branches, self.growth.sampling)
        drafts = self.growth.drafts(branches, steps)
        fresh = [] if self.embeddings.empty else self.embeddings.new(self.growth.to_compare(drafts))
        if not self.asks(fresh):
            return drafts, await self.score(drafts)
        rewards, _ = await asyncio.gather(self.score(drafts), self.learn(fresh))
        return drafts, rewards

    async def score(self, drafts: Sequence[Draft]) -> dict[int, float]:
        """Rewards by draft id, unrounded; one for each distinct path that needs one."""
        wanted = self.growth.to_score(drafts)
        if not wanted:
            return {}
        problem = self.problem
        given = await self.engine.score(self.tree_id, problem.prompt, problem.question, wanted)
        good = [r for r in given if 0.0 <= r <= 1.0]
        if len(good) != len(wanted):
            able = self.engine.capabilities
            raise RewardMissing(
                f"engine {able.engine} ({dict(able.models)}) gave {len(good)} rewards in [0, 1] "
                f"for {len(wanted)} trajectories"
            )
        return {trajectory.node: r for trajectory, r in zip(wanted, given, strict=True)}

    async def outcome(
        self, stop: StopReason, cost: TreeCost, emit: Callable[[Event], None]
    ) -> Outcome:
        """Hold the vote and sum up."""
        tree = self.growth.tree
        ballot = hold_vote(tree, vote_name(self.spec), await self.answers())
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
            stats=self.tally.stats(tree, ballot.chosen, self.clock() - self.start, cost),
            digest=digest,
            spec=self.spec,
            reproducible=self.engine.capabilities.reproducible,
        )
