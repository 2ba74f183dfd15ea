"""From finished trajectories to one answer and one reply.

Rewards are whole numbers of 1/UNITS, so sums, products and means of them are compared exactly, as
fractions: what is a tie on paper is one here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import exp, fsum, prod
from typing import NamedTuple

from search.engine import RewardMissing
from search.outcome import AnswerClass
from search.policies.policy import Scores
from search.spec import SearchSpec, VoteName
from search.tree import ROOT, UNITS, Finish, Node, NodeState, Tree

VOTE_SCORES: Mapping[VoteName, Scores] = {
    "weighted_majority": Scores.FINISHED,
    "majority": Scores.NONE,
    "confidence": Scores.NONE,
    "lowest_confidence": Scores.NONE,
    "lineages": Scores.FINISHED,
    "best_last": Scores.FINISHED,
    "best_min": Scores.ALL,
    "best_prod": Scores.ALL,
    "best_mean": Scores.ALL,
}
"""Which nodes a rule needs the rewards of."""
CONFIDENCES = ("confidence", "lowest_confidence")
"""Rules that weigh a trajectory by its own log-probabilities and need no reward model."""


@dataclass(frozen=True, slots=True)
class Ballot:
    """The result of a vote. Fields as on ``search.outcome.Outcome``; ``rule`` is its ``vote``."""

    answer: str | None
    chosen: int | None
    answers: tuple[AnswerClass, ...]
    rule: str


class Standing(NamedTuple):
    """The rank of a class: by weight, then by members, then by the lowest id (here: negative)."""

    weight: Fraction
    members: int
    age: int


def vote_name(spec: SearchSpec) -> VoteName:
    """The rule a spec asks for: weighted majority, or majority where the policy scores nothing.

    ``beam`` keeps distinct leaves: their number says nothing about likelihood, so the best one is
    the answer, unless it stops early by a probability, which counts votes. ``dora`` funds every
    direction, likely or not, so lineages vote, each once for an answer.
    """
    if spec.vote is not None:
        return spec.vote
    if spec.policy == "self_consistency":
        return "majority"
    by_odds = isinstance(spec.consensus, float)
    if spec.policy == "beam" and spec.filter_duplicates and not by_odds:
        return "best_last"
    return "lineages" if spec.policy == "dora" else "weighted_majority"


class AnswerClasses:
    """The finished trajectories of one growing tree, sorted into classes of equal answers.

    In id order, each joins the class with the lowest id whose first member's answer equals its own,
    or opens one. So the classes follow from the tree alone, even where ``same`` is not transitive,
    and what joins later never changes them. A class is called by its first member's answer.
    """

    def __init__(
        self,
        answer_of: Callable[[str], str | None],
        same: Callable[[str, str], bool] | None = None,
    ) -> None:
        """``answer_of``: a reply's answer in canonical form, or None. ``same``: whether two
        answers with different spellings are equal; called with the first member's answer first.
        """
        self._answer_of = answer_of
        self._same = same
        self._seen = 0
        self._name_of: dict[str, str] = {}
        self._members: dict[str, list[Node]] = {}

    @property
    def compares(self) -> bool:
        """Whether answers are compared by more than their spelling, which may take a while."""
        return self._same is not None

    def of(self, tree: Tree) -> Mapping[str, Sequence[Node]]:
        """The current classes, members in id order; every call must pass the same growing tree."""
        for node in tree.nodes[self._seen :]:
            if node.state is NodeState.FINISHED:
                self._join(node, self._answer_of(tree.text(node.id)))
        self._seen = len(tree)
        return self._members

    def _join(self, node: Node, answer: str | None) -> None:
        if answer is None:
            return
        if answer not in self._name_of:
            equals = (name for name in self._members if self._same and self._same(name, answer))
            self._name_of[answer] = next(equals, answer)
        self._members.setdefault(self._name_of[answer], []).append(node)


def hold_vote(tree: Tree, rule: VoteName, classes: Mapping[str, Sequence[Node]]) -> Ballot:
    """Vote among the finished trajectories that have an answer.

    ``classes``: as ``AnswerClasses`` sorts them. A class weighs the sum of its members' last
    rewards (weighted majority), their number (majority), the sum of their confidences (confidence,
    lowest_confidence: see ``confidence_units``), the sum over lineages of the last reward of its
    best member there (lineages), or its best member's score (``best_*``). Equal weights: the
    class with more members, then the one with the lowest node id. The reply is the member with the
    highest last reward (``best_*``: the highest score; the confidences: the highest of them), then
    the lowest id. If no reply has an answer, the best reply by last reward is taken, by mean
    log-probability where there are no rewards, and the ballot's rule says so; trajectories that
    ended by themselves come before those that were cut. If every branch died empty or looping, the
    path above the last dead node is the reply.

    Raises RewardMissing if the rule needs a reward that is not there.
    """
    finished = tree.finished()
    if not finished:
        return _dead_end(tree)
    if not classes:
        return _without_answers(tree, finished)
    ranked = sorted(classes, key=lambda a: standing(tree, rule, classes[a]), reverse=True)
    answers = tuple(_class(tree, rule, answer, classes[answer]) for answer in ranked)
    return Ballot(answers[0].answer, answers[0].reply, answers, rule)


def class_weight(tree: Tree, rule: VoteName, members: Sequence[Node]) -> Fraction:
    """The weight of a class of equal answers under ``rule``."""
    if rule == "majority":
        return Fraction(len(members))
    if rule == "weighted_majority":
        return Fraction(sum(_units(node, rule) for node in members), UNITS)
    if rule in CONFIDENCES:
        return Fraction(sum(confidence_units(tree, rule, node) for node in members), UNITS)
    if rule == "lineages":
        return Fraction(sum(_by_lineage(rule, members).values()), UNITS)
    return max(path_score(tree, rule, node) for node in members)


def _by_lineage(rule: VoteName, members: Sequence[Node]) -> dict[int, int]:
    """The last reward of the best member of each lineage, in 1/UNITS.

    A lineage is a child of the root with all its descendants. Its trajectories share steps, and so
    errors: however many of them have an answer, they are one voice. For chains, which share
    nothing, this is the weighted majority.
    """
    best: dict[int, int] = {}
    for node in members:
        best[node.path[0]] = max(best.get(node.path[0], 0), _units(node, rule))
    return best


def path_score(tree: Tree, rule: VoteName, node: Node) -> Fraction:
    """A trajectory's own score: its last reward, or min, product or mean over its steps; or its
    confidence."""
    if rule in CONFIDENCES:
        return Fraction(confidence_units(tree, rule, node), UNITS)
    if VOTE_SCORES[rule] is not Scores.ALL:
        return Fraction(_units(node, rule), UNITS)
    return joined(rule, path_units(tree, rule, node.id))


def confidence_units(tree: Tree, rule: VoteName, node: Node) -> int:
    """The policy model's confidence in a trajectory, in 1/UNITS: the geometric mean of its tokens'
    probabilities (CISC's length-normalised response probability, arXiv 2502.06233, without its
    temperature), or the lowest such mean of one of its steps. The latter is DeepConf's lowest
    group confidence (arXiv 2508.15260) with the steps as its groups and the sampled tokens in place
    of the likeliest ones. Raises RewardMissing if a step's log-probability is not known.
    """
    mean = _mean_logprob(tree, node)
    if mean is None:
        raise RewardMissing(f"node {node.id} has no log-probability; vote {rule} needs one")
    steps = [step.logprob for step in tree.chain(node.id) if step.logprob is not None]
    return round(exp(mean if rule == "confidence" else min(steps)) * UNITS)


def path_units(tree: Tree, rule: VoteName, node_id: int) -> list[int]:
    """The rewards of the steps down to a node, in 1/UNITS. Raises RewardMissing if one has none."""
    return [_units(step, rule) for step in tree.chain(node_id)]


def joined(rule: VoteName, units: Sequence[int]) -> Fraction:
    """Combine the rewards of a path's steps, in 1/UNITS, to one score, for rules that use all."""
    if rule == "best_min":
        return Fraction(min(units), UNITS)
    if rule == "best_prod":
        return Fraction(prod(units), UNITS ** len(units))
    return Fraction(sum(units), UNITS * len(units))


def standing(tree: Tree, rule: VoteName, members: Sequence[Node]) -> Standing:
    """The standing of a class; the greatest wins. ``members``: in id order."""
    return Standing(class_weight(tree, rule, members), len(members), -members[0].id)


def _class(tree: Tree, rule: VoteName, answer: str, members: Sequence[Node]) -> AnswerClass:
    reply = min(members, key=lambda node: (-_vote_weight(tree, rule, node), node.id))
    return AnswerClass(answer, float(class_weight(tree, rule, members)), len(members), reply.id)


def _vote_weight(tree: Tree, rule: VoteName, node: Node) -> Fraction:
    """A member's weight in the choice of its class's reply; the greatest wins."""
    if rule == "majority":
        return Fraction(round((node.reward or 0.0) * UNITS), UNITS)
    return path_score(tree, rule, node)


def _units(node: Node, rule: str) -> int:
    """A node's reward in 1/UNITS."""
    if node.reward is None:
        raise RewardMissing(f"node {node.id} has no reward; vote {rule} needs one")
    return round(node.reward * UNITS)


def _without_answers(tree: Tree, finished: Sequence[Node]) -> Ballot:
    pool = [node for node in finished if node.finish is Finish.END] or finished
    return _best(tree, pool, "no reply has an answer")


def _best(tree: Tree, pool: Sequence[Node], why: str) -> Ballot:
    """The ballot without votes: the path with the highest last reward, or mean log-probability if
    a reward is missing; the first path if one of these is missing too."""
    if all(node.reward is not None for node in pool):
        best = min(pool, key=lambda node: (-(node.reward or 0.0), node.id))
        return Ballot(None, best.id, (), f"best_last ({why})")
    pairs = [(_mean_logprob(tree, node), node.id) for node in pool]
    mean_of = {node: mean for mean, node in pairs if mean is not None}
    if len(mean_of) < len(pairs):
        return Ballot(None, min(node.id for node in pool), (), f"first ({why})")
    best = max(mean_of, key=lambda node: (mean_of[node], -node))
    return Ballot(None, best, (), f"best_logprob ({why})")


def cut_short(tree: Tree) -> Ballot:
    """The reply of a tree that a token budget ended before any trajectory finished: the best open
    path, by its last reward or, without rewards, its mean log-probability."""
    open_paths = [node for node in tree.leaves() if node.id != ROOT]
    return _best(tree, open_paths, "no trajectory finished") if open_paths else _dead_end(tree)


def _dead_end(tree: Tree) -> Ballot:
    """The ballot if nothing finished: a reply only if no leaf is open, as all branches died."""
    if any(tree.leaves()):
        return Ballot(None, None, (), "none (no trajectory finished)")
    return Ballot(None, tree.nodes[-1].parent, (), "last (every branch died)")


def _mean_logprob(tree: Tree, node: Node) -> float | None:
    """Mean natural log-probability a token over the whole trajectory; None if a step's is not
    known."""
    steps = tree.chain(node.id)
    sums = [s.logprob * len(s.tokens) for s in steps if s.logprob is not None]
    whole = len(sums) == len(steps)
    return fsum(sums) / sum(len(s.tokens) for s in steps) if whole else None
