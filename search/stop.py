"""When a search is over, and why: whichever of these is met first.

``answered``: as many trajectories as the width says have ended by themselves, or as many as a
policy needs: ``adaptive``, when its chains agree. ``depth``: nothing is left to expand, and a
trajectory was cut at ``max_depth``. ``width_spent``: nothing is left to expand, and trajectories
were cut by their token or context limit, or their last branches died empty or looping;
or a backtracking search has spent its ``expansions``, which bound its breadth as the width does.
``max_tokens``: the next child does not fit into ``max_tokens`` generated tokens. ``kv``: the paths
of the nodes that may still grow hold more than ``max_kv_tokens``, equal prefixes counted once, and
before the policy has chosen among them: all of these are held when it chooses.
``deadline``: the time is up; the round under way is dropped. ``consensus``: the answer is settled,
as ``consensus_met`` says. ``cancelled``: set by the code that cancelled the search; such a search
has no outcome of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from math import comb

from search.policies.policy import BacktrackingPolicy, Policy, Scores, remaining
from search.spec import SearchSpec, StopReason, VoteName
from search.tree import UNITS, Finish, Node, Tree
from search.vote import CONFIDENCES, VOTE_SCORES, Standing, joined, path_units, standing, vote_name

MEAN_LEAD = Fraction(1, 10**12)
"""Smaller than any difference of two means: a possible tie must not settle the answer."""


def may_end_early(spec: SearchSpec) -> bool:
    """Whether something other than the policy may end the search between two rounds, so that steps
    drawn beyond the next round may be wasted."""
    cut = (spec.max_tokens, spec.max_kv_tokens, spec.deadline_ms, spec.consensus)
    return any(limit is not None for limit in cut)


def budget_met(tree: Tree, spec: SearchSpec, held_tokens: Callable[[], int]) -> StopReason | None:
    """The token or KV budget of the spec that leaves no room for another round, if one does.

    ``held_tokens`` counts the KV tokens that the search needs to go on.
    """
    if spec.max_tokens is not None and tree.generated_tokens >= spec.max_tokens:
        return StopReason.MAX_TOKENS
    if spec.max_kv_tokens is not None and held_tokens() > spec.max_kv_tokens:
        return StopReason.KV
    return None


def why_done(tree: Tree, spec: SearchSpec, policy: Policy) -> StopReason:
    """Why a policy plans nothing more: answered, depth or width_spent."""
    if isinstance(policy, BacktrackingPolicy) and (reason := policy.stopped(tree)) is not None:
        return reason
    finished = tree.finished()
    cut = [node for node in finished if node.finish is Finish.LIMIT]
    if any(node.depth >= spec.max_depth for node in cut):
        return StopReason.DEPTH
    if cut or len(finished) < spec.width:
        return StopReason.WIDTH_SPENT
    return StopReason.ANSWERED


def consensus_met(
    tree: Tree,
    spec: SearchSpec,
    classes: Mapping[str, Sequence[Node]],
    growing: Iterable[int],
) -> bool:
    """Whether the answer is settled as ``spec.consensus`` asks, so that no more rounds are needed.

    ``classes``: the finished trajectories by answer. ``growing``: ids of all nodes that this or a
    later round may expand; at least one.

    ``certain``: no trajectory that is still out can change the answer, even if all of them join one
    class, old or new, with the best score they can have. (The reply may still become another
    member of the winning class.) A policy finishes at most ``width`` trajectories; once that many
    have finished, nothing is settled. A number: the least ``posterior`` of the leading class over
    the largest other one; under ``lineages`` a class is as large as its number of lineages.
    """
    out = remaining(tree, spec.width)
    if not classes or out < 1:
        return False
    rule = vote_name(spec)
    *rivals, leader = sorted(standing(tree, rule, members) for members in classes.values())
    if spec.consensus == "certain":
        newcomer = Standing(Fraction(0), 0, -len(tree))
        best = _best_score(tree, spec, rule, growing)
        return all(_joined(rival, rule, out, best) < leader for rival in (*rivals, newcomer))
    assert spec.consensus is not None, "nobody asks for it"
    draws = {standing(tree, rule, members): _draws(rule, members) for members in classes.values()}
    second = max((draws[rival] for rival in rivals), default=0)
    return posterior(draws[leader], second) >= spec.consensus


def _draws(rule: VoteName, members: Sequence[Node]) -> int:
    """How often an answer was drawn: as the vote counts it, so that kin are one draw."""
    return len({node.path[0] for node in members}) if rule == "lineages" else len(members)


def posterior(first: int, second: int) -> float:
    """The probability that of two answers the one drawn ``first`` times is the likelier one.

    With p the share of the first among the two, uniform before any draw, p is distributed as
    Beta(first + 1, second + 1) after them (Aggarwal et al. 2023, "Let's Sample Step by Step"), and
    P(p > 1/2) = P(Binomial(n, 1/2) <= first) with n = first + second + 1.
    """
    n = first + second + 1
    return sum(comb(n, k) for k in range(first + 1)) / 2**n


def _joined(rival: Standing, rule: VoteName, out: int, best: Fraction) -> Standing:
    """The standing of a rival class after ``out`` more trajectories of score ``best`` join it."""
    count = rival.members + out
    if rule == "majority":
        return Standing(Fraction(count), count, rival.age)
    if rule in ("weighted_majority", "lineages", *CONFIDENCES):
        return Standing(rival.weight + out, count, rival.age)
    return Standing(max(rival.weight, best), count, rival.age)


def _best_score(tree: Tree, spec: SearchSpec, rule: VoteName, growing: Iterable[int]) -> Fraction:
    """The best score of a trajectory that is still out: every step to come gets reward 1."""
    if VOTE_SCORES[rule] is not Scores.ALL:
        return Fraction(1)
    lead = MEAN_LEAD if rule == "best_mean" else 0
    return lead + max(
        joined(rule, path_units(tree, rule, node) + [UNITS] * (spec.max_depth - tree[node].depth))
        for node in growing
    )


Same = Callable[[str, str], bool]
"""Whether two answers that are spelled differently are equal."""
CLOSING_SECONDS = 0.1
"""Seconds after the deadline for comparing answers, and for an engine to accept an abort."""
RELEASE_SECONDS = 0.05
"""Seconds after the deadline for the engine to report a tree's cost: short, as the reply waits for
it even if the engine is stuck."""


class TooLate(Exception):
    """Something awaited was not ready in time."""


@dataclass(frozen=True, slots=True)
class Deadline:
    """``at``: a time by ``clock``, in seconds; None for no deadline."""

    clock: Callable[[], float]
    at: float | None

    def remaining(self, more: float = 0.0) -> float | None:
        """Seconds until the deadline, at least 0, plus ``more``; None without a deadline."""
        return None if self.at is None else max(0.0, self.at - self.clock()) + more

    def closing(self, most: float | None = None) -> float | None:
        """Seconds until nothing is awaited any more, at most ``most``; None: no limit."""
        bounds = (self.remaining(CLOSING_SECONDS), most)
        return min((bound for bound in bounds if bound is not None), default=None)

    def releasing(self) -> float | None:
        """Seconds to wait for the engine to report a tree's cost; None: no limit."""
        return self.remaining(RELEASE_SECONDS)

    def check(self) -> None:
        """Raise TooLate at or after the deadline."""
        if self.at is not None and self.clock() >= self.at:
            raise TooLate

    def bound(self, same: Same | None) -> Same | None:
        """Make ``same`` raise TooLate once nobody waits for it, so that the calling thread ends."""
        at = self.at
        if at is None or same is None:
            return same

        def in_time(first: str, second: str) -> bool:
            if self.clock() >= at + CLOSING_SECONDS:
                raise TooLate
            return same(first, second)

        return in_time
