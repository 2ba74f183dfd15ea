"""From finished trajectories to one answer and one reply."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import fsum, prod

from search.digest import UNITS
from search.engine import RewardMissing
from search.outcome import AnswerClass
from search.policies.policy import Scores
from search.spec import SearchSpec, VoteName
from search.tree import Finish, Node, Tree

VOTE_SCORES: Mapping[VoteName, Scores] = {
    "weighted_majority": Scores.FINISHED,
    "majority": Scores.NONE,
    "best_last": Scores.FINISHED,
    "best_min": Scores.ALL,
    "best_prod": Scores.ALL,
    "best_mean": Scores.ALL,
}
"""Which nodes a rule needs the rewards of."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """The result of a vote. Fields as on ``search.outcome.Outcome``; ``rule`` is its ``vote``."""

    answer: str | None
    chosen: int | None
    answers: tuple[AnswerClass, ...]
    rule: str


def vote_name(spec: SearchSpec) -> VoteName:
    """The rule a spec asks for: weighted majority, or majority where the policy scores nothing."""
    if spec.vote is not None:
        return spec.vote
    return "majority" if spec.policy == "self_consistency" else "weighted_majority"


def hold_vote(tree: Tree, rule: VoteName, answer_of: Callable[[str], str | None]) -> Ballot:
    """Vote among the finished trajectories that have an answer.

    ``answer_of`` gives a reply's answer in canonical form, or None. A class weighs the sum of its
    members' last rewards (weighted majority), their number (majority) or its best member's score
    (``best_*``). Equal weights: the class with more members, then the one with the lowest node id.
    The reply is the member with the highest last reward (``best_*``: the highest score), then the
    lowest id. If no reply has an answer, the best reply by last reward is taken, by mean
    log-probability where there are no rewards, and the ballot's rule says so; trajectories that
    ended by themselves come before those that were cut.

    Raises RewardMissing if the rule needs a reward that is not there.
    """
    finished = tree.finished()
    classes = _ranked(tree, rule, answer_of)
    if not finished:
        return Ballot(None, None, (), "none (no trajectory finished)")
    if not classes:
        return _without_answers(tree, finished)
    answers = tuple(
        AnswerClass(answer, class_weight(tree, rule, members), len(members))
        for answer, members in classes.items()
    )
    return Ballot(answers[0].answer, replies(tree, rule, answer_of)[0], answers, rule)


def replies(tree: Tree, rule: VoteName, answer_of: Callable[[str], str | None]) -> list[int]:
    """The reply of every class as node ids, the heaviest class first: distinct answers all.

    Empty if no finished trajectory has an answer.
    """
    classes = _ranked(tree, rule, answer_of)
    return [
        min(members, key=lambda node: (-_merit(tree, rule, node), node.id)).id
        for members in classes.values()
    ]


def class_weight(tree: Tree, rule: VoteName, members: Sequence[Node]) -> float:
    """What a class of equal answers weighs under ``rule``."""
    if rule == "majority":
        return float(len(members))
    if rule == "weighted_majority":
        return sum(round(_reward(node, rule) * UNITS) for node in members) / UNITS
    return max(path_score(tree, rule, node) for node in members)


def path_score(tree: Tree, rule: VoteName, node: Node) -> float:
    """A trajectory's own score: its last reward, or min, product or mean over its steps."""
    if VOTE_SCORES[rule] is not Scores.ALL:
        return _reward(node, rule)
    rewards = [_reward(step, rule) for step in tree.chain(node.id)]
    if rule == "best_min":
        return min(rewards)
    return prod(rewards) if rule == "best_prod" else fsum(rewards) / len(rewards)


def _ranked(
    tree: Tree, rule: VoteName, answer_of: Callable[[str], str | None]
) -> dict[str, list[Node]]:
    """The members of each class of equal answers, the heaviest class first."""
    classes: dict[str, list[Node]] = {}
    for node in tree.finished():
        answer = answer_of(tree.text(node.id))
        if answer is not None:
            classes.setdefault(answer, []).append(node)
    return {a: classes[a] for a in sorted(classes, key=lambda a: _standing(tree, rule, classes[a]))}


def _standing(tree: Tree, rule: VoteName, members: Sequence[Node]) -> tuple[float, int, int]:
    """Sort key: heavier first, then more members, then the lowest id (members are in order)."""
    return -class_weight(tree, rule, members), -len(members), members[0].id


def _merit(tree: Tree, rule: VoteName, node: Node) -> float:
    """What makes a member its class's reply."""
    if rule == "majority":
        return node.reward or 0.0
    return path_score(tree, rule, node)


def _reward(node: Node, rule: str) -> float:
    if node.reward is None:
        raise RewardMissing(f"node {node.id} has no reward; vote {rule} needs one")
    return node.reward


def _without_answers(tree: Tree, finished: Sequence[Node]) -> Ballot:
    pool = [node for node in finished if node.finish is Finish.END] or finished
    if all(node.reward is not None for node in pool):
        chosen = min(pool, key=lambda node: (-(node.reward or 0.0), node.id))
        return Ballot(None, chosen.id, (), "best_last (no reply has an answer)")
    chosen = min(pool, key=lambda node: (-_mean_logprob(tree, node), node.id))
    return Ballot(None, chosen.id, (), "best_logprob (no reply has an answer)")


def _mean_logprob(tree: Tree, node: Node) -> float:
    """Mean natural log-probability a token over the whole trajectory."""
    steps = tree.chain(node.id)
    return fsum(s.logprob * len(s.tokens) for s in steps) / sum(len(s.tokens) for s in steps)
