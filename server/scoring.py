"""Scoring replies that clients give: the steps after one question are a tree, read level by level
as a search's are, so that both share passes, cached prefixes and the order of their turns.

Equal steps after equal ones are one node with one reward, whoever gave them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from search.controller import ABORT_SECONDS, Problem, check_rewards, within
from search.engine import Engine, EngineError, Trajectory
from search.stop import Deadline, TooLate
from search.tree import node_seed, round_reward
from server.api_errors import NO_RETRY, ApiError

Texts = tuple[str, ...]
Rewards = list[float | None]
"""One a step; None for a step that an outcome model does not score."""
OnScored = Callable[[int], None]
"""Told of tokens that have been read to the end: steps, and once their question."""


@dataclass(frozen=True, slots=True)
class ReplySteps:
    """A reply that a client has, as far as it goes: ids and texts of its steps."""

    problem: Problem
    steps: tuple[tuple[int, ...], ...]
    texts: Texts


@dataclass(slots=True)
class ScoreTree:
    """All replies to one question, and their rewards by the texts of a path.

    ``outcome``: whole replies alone have a reward, and are one level.
    """

    name: str
    problem: Problem
    outcome: bool
    levels: list[list[Trajectory]] = field(default_factory=list)
    rewards: dict[Texts, float] = field(default_factory=dict)
    _known: set[Texts] = field(default_factory=set)

    def add(self, reply: ReplySteps, seed: int) -> None:
        """Take in the paths of a reply that are not there yet."""
        most = len(reply.texts)
        for depth in range(most if self.outcome else 1, most + 1):
            texts, level = reply.texts[:depth], 0 if self.outcome else depth - 1
            if texts in self._known:
                continue
            self._known.add(texts)
            if level == len(self.levels):
                self.levels.append([])
            judged = node_seed(seed, "judge", (depth,))  # alone or in company, the same verdicts
            path = Trajectory(len(self._known), reply.steps[:depth], texts, judged)
            self.levels[level].append(path)

    async def score(self, engine: Engine, on_scored: OnScored) -> None:
        """Have all levels scored, one after the other."""
        prompt, question = self.problem.prompt, self.problem.question
        unread = len(prompt)
        for paths in self.levels:
            rewards = await engine.score(self.name, prompt, question, paths)
            check_rewards(rewards, len(paths), engine.capabilities)
            for path, reward in zip(paths, rewards, strict=True):
                self.rewards[path.texts] = round_reward(reward)
                unread += sum(map(len, path.steps if self.outcome else path.steps[-1:]))
            on_scored(unread)
            unread = 0

    def rewards_of(self, reply: ReplySteps) -> Rewards:
        """Those of a reply that was taken in."""
        texts = reply.texts
        if self.outcome:
            return [None] * (len(texts) - 1) + [self.rewards[texts]]
        return [self.rewards[texts[:depth]] for depth in range(1, len(texts) + 1)]


def score_trees(
    replies: Sequence[ReplySteps], name: str, seed: int, *, outcome: bool
) -> dict[Problem, ScoreTree]:
    """A tree for each question, named after ``name``."""
    trees: dict[Problem, ScoreTree] = {}
    for reply in replies:
        problem = reply.problem
        if problem not in trees:
            trees[problem] = ScoreTree(f"{name}.{len(trees)}", problem, outcome)
        trees[problem].add(reply, seed)
    return trees


async def score_replies(
    replies: Sequence[ReplySteps],
    engine: Engine,
    name: str,
    *,
    seed: int,
    seconds: float,
    on_scored: OnScored,
) -> list[Rewards]:
    """The rewards of each reply's steps, rounded to 1e-4; all questions side by side.

    Raises EngineError, and ApiError (504) when ``seconds`` are over. Whatever happens, the engine
    lets go of the trees.
    """
    until = Deadline(time.monotonic, time.monotonic() + seconds)
    trees = score_trees(replies, name, seed, outcome=engine.capabilities.outcome)
    try:
        await within(until.left(), _side_by_side(trees.values(), engine, on_scored))
    except TooLate:
        await _let_go(trees.values(), engine.abort, until.closing(ABORT_SECONDS))
        message = "the deadline came before all steps were scored"
        raise ApiError(504, "deadline_exceeded", message, headers=NO_RETRY) from None
    except BaseException:
        await _let_go(trees.values(), engine.abort, until.closing(ABORT_SECONDS))
        raise
    await _let_go(trees.values(), engine.release, until.closing())
    return [trees[reply.problem].rewards_of(reply) for reply in replies]


async def _side_by_side(trees: Collection[ScoreTree], engine: Engine, on_scored: OnScored) -> None:
    """All trees; when one fails, none of the others is at work any more."""
    try:
        async with asyncio.TaskGroup() as group:
            for tree in trees:
                group.create_task(tree.score(engine, on_scored))
    except BaseExceptionGroup as several:
        raise several.exceptions[0] from None


async def _let_go(
    trees: Collection[ScoreTree],
    let_go: Callable[[str], Awaitable[object]],
    seconds: float | None,
) -> None:
    async def one(tree: ScoreTree) -> None:
        with suppress(EngineError, TooLate):
            await within(seconds, let_go(tree.name))

    await asyncio.gather(*map(one, trees))
