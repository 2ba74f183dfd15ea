"""A search's spec within what its key may ask for and its models can read, and what it may cost."""

from __future__ import annotations

from typing import Any

from search.engine import Capabilities
from search.outcome import Outcome
from search.policies.policy import BacktrackingPolicy, Scores
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from search.vote import VOTE_SCORES, vote_name
from server.api_errors import bad_value
from server.api_keys import ApiKey


def apply_limits(
    spec: SearchSpec, key: ApiKey, *, seed: int, trajectory_tokens: int | None = None
) -> SearchSpec:
    """The spec with a seed and within the key's limits. Raises ApiError naming what is over one.

    ``seed`` is taken when the spec has none; of two limits on a trajectory the smaller holds. What
    is not given is lowered to the limit without a word, what is given never.
    """
    given = spec.model_fields_set
    changes: dict[str, Any] = {}
    for name, most in (("width", key.width), ("max_depth", key.depth)):
        if name in given:
            _must_not_exceed(name, getattr(spec, name), most)
        elif getattr(spec, name) > most:
            changes[name] = most
    if spec.seed is None:
        changes["seed"] = seed
    if trajectory_tokens is not None:
        own = spec.trajectory_tokens if "trajectory_tokens" in given else trajectory_tokens
        changes["trajectory_tokens"] = min(own, trajectory_tokens)
    settled = spec.model_copy(update=changes)
    if spec.max_tokens is not None:
        _must_not_exceed("max_tokens", spec.max_tokens, key.tree_tokens)
    elif most_tokens(settled) > key.tree_tokens:
        settled = settled.model_copy(update={"max_tokens": key.tree_tokens})
    return settled


def most_tokens(spec: SearchSpec) -> int:
    """The most that a tree can come to: every round as wide as may be, every step as long.

    No round draws more children than the width. A policy that goes level by level has a round a
    level; one that goes back has more of them, but draws no more than its expansions come to.
    """
    step = min(spec.step_tokens or spec.max_step_tokens, spec.trajectory_tokens)
    goes_back = isinstance(POLICIES[spec.policy](spec), BacktrackingPolicy)
    nodes = spec.expansions * spec.branch if goes_back else spec.width * spec.max_depth
    most = nodes * step
    return most if spec.max_tokens is None else min(most, spec.max_tokens)


def _must_not_exceed(name: str, value: int, most: int) -> None:
    if value > most:
        raise bad_value(f"search.{name}", f"at most {most} on this server, got {value}")


def policy_needs_rewards(spec: SearchSpec) -> bool:
    """Whether the policy itself compares rewards."""
    return POLICIES[spec.policy](spec).scores is not Scores.NONE


def needs_rewards(spec: SearchSpec) -> bool:
    """Whether a search as the spec says asks for rewards at all."""
    return policy_needs_rewards(spec) or VOTE_SCORES[vote_name(spec)] is not Scores.NONE


def context_for(spec: SearchSpec, engine: Capabilities) -> int:
    """Most tokens of prompt and reply: the context, less what a reward format reads with them.

    It follows from the spec and the model alone, and so does the tree.
    """
    once, each = engine.score_tokens if needs_rewards(spec) else (0, 0)
    return max(1, engine.context_tokens - once - spec.max_depth * each)


MOST_KINDS = 1024


class TypicalCost:
    """What searches of each policy and width have cost on this server so far."""

    def __init__(self) -> None:
        self._sums: dict[tuple[str, int], tuple[int, int, float]] = {}

    def note(self, outcome: Outcome) -> None:
        """Take in a search that ended."""
        kind = outcome.spec.policy, outcome.spec.width
        if kind in self._sums or len(self._sums) < MOST_KINDS:
            count, tokens, seconds = self._sums.get(kind, (0, 0, 0.0))
            stats = outcome.stats
            self._sums[kind] = (
                count + 1,
                tokens + stats.generated_tokens,
                seconds + stats.seconds,
            )

    def typical(self, policy: str, width: int) -> dict[str, Any] | None:
        """Means over the searches of this kind, None if there was none."""
        if (policy, width) not in self._sums:
            return None
        count, tokens, seconds = self._sums[policy, width]
        return {
            "completion_tokens": round(tokens / count),
            "seconds": round(seconds / count, 3),
            "searches": count,
        }
