"""Scores replies that clients send. The replies to one question form a tree, which is scored level
by level as in a search, so that both share passes, cached prefixes and scheduling.

Equal steps after equal steps are one node with one reward.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from runtime.all_of import all_of
from search.controller import ABORT_SECONDS, check_rewards, within
from search.engine import Engine, EngineError, Trajectory
from search.problem import Problem
from search.stop import Deadline, TooLate
from search.tree import ROOT, node_seed, round_reward
from server.api_errors import NO_RETRY, ApiError

Texts = tuple[str, ...]
Rewards = list[float | None]
"""One reward a step; None for a step that an outcome model does not score."""
OnScored = Callable[[int], None]
"""Called with the number of tokens scored: those of the steps, and once those of the question."""


@dataclass(frozen=True, slots=True)
class ReplySteps:
    """A client's reply, which may be unfinished: token ids and texts of its steps."""

    problem: Problem
    steps: tuple[tuple[int, ...], ...]
    texts: Texts


@dataclass(slots=True)
class ScoredReply:
    """A reply, the node of its last scored step, and the rewards so far."""

    reply: ReplySteps
    node: int = ROOT
    rewards: Rewards = field(default_factory=list)

    @property
    def done(self) -> bool:
        """Whether all steps of the reply are scored."""
        return len(self.rewards) == len(self.reply.texts)


@dataclass(slots=True)
class ScoreTree:
    """All replies to one question. ``outcome``: only whole replies get a reward."""

    name: str
    problem: Problem
    seed: int
    outcome: bool
    replies: list[ScoredReply] = field(default_factory=list)
    _nodes: int = 0

    async def score(self, engine: Engine, on_scored: OnScored) -> None:
        """Score level by level; a level's trajectories are built just before it is scored."""
        prompt, question = self.problem.prompt, self.problem.question
        unread = len(prompt)
        while unfinished := [entry for entry in self.replies if not entry.done]:
            paths: dict[tuple[int, Texts], Trajectory] = {}
            for entry in unfinished:
                start, end = len(entry.rewards), self._end(entry)
                key = entry.node, entry.reply.texts[start:end]
                if key not in paths:
                    paths[key] = self._path(entry.reply, end)
                    unread += sum(map(len, entry.reply.steps[start:end]))
                entry.node = paths[key].node
            trajectories = list(paths.values())
            rewards = await engine.score(self.name, prompt, question, trajectories)
            check_rewards(rewards, len(trajectories), engine.capabilities)
            by_node = {path.node: r for path, r in zip(trajectories, rewards, strict=True)}
            for entry in unfinished:
                skipped = self._end(entry) - len(entry.rewards) - 1
                entry.rewards += [None] * skipped
                entry.rewards.append(round_reward(by_node[entry.node]))
            on_scored(unread)
            unread = 0

    def _end(self, entry: ScoredReply) -> int:
        """The number of a reply's steps after the next scoring, those scored before included."""
        return len(entry.reply.texts) if self.outcome else len(entry.rewards) + 1

    def _path(self, reply: ReplySteps, end: int) -> Trajectory:
        self._nodes += 1
        judge_seed = node_seed(self.seed, "judge", (end,))  # independent of the other replies
        return Trajectory(self._nodes, reply.steps[:end], reply.texts[:end], judge_seed)


async def score_replies(
    replies: Sequence[ReplySteps],
    engine: Engine,
    name: str,
    *,
    seed: int,
    seconds: float,
    on_scored: OnScored,
) -> list[Rewards]:
    """The rewards of each reply's steps, rounded to 1e-4; all questions are scored concurrently.

    Raises EngineError, and ApiError (504) after ``seconds``. In every case the engine releases the
    trees, whose names begin with ``name``.
    """
    deadline = Deadline(time.monotonic, time.monotonic() + seconds)
    trees: dict[Problem, ScoreTree] = {}
    entries = [ScoredReply(reply) for reply in replies]
    for entry in entries:
        args = f"{name}.{len(trees)}", entry.reply.problem, seed, engine.capabilities.outcome
        trees.setdefault(entry.reply.problem, ScoreTree(*args)).replies.append(entry)
    try:
        scores = (tree.score(engine, on_scored) for tree in trees.values())
        await within(deadline.remaining(), all_of(scores))
    except TooLate:
        await _let_go(trees.values(), engine.abort, deadline.closing(ABORT_SECONDS))
        message = "the deadline came before all steps were scored"
        raise ApiError(504, "deadline_exceeded", message, headers=NO_RETRY) from None
    except BaseException:
        await _let_go(trees.values(), engine.abort, deadline.closing(ABORT_SECONDS))
        raise
    await _let_go(trees.values(), engine.release, deadline.releasing())
    return [entry.rewards for entry in entries]


async def _let_go(
    trees: Collection[ScoreTree],
    let_go: Callable[[str], Awaitable[object]],
    seconds: float | None,
) -> None:
    async def close_tree(tree: ScoreTree) -> None:
        with suppress(EngineError, TooLate):
            await within(seconds, let_go(tree.name))

    await asyncio.gather(*map(close_tree, trees))
