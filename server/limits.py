"""Applies a key's limits to searches, and computes the most tokens that a search can draw."""

from __future__ import annotations

from typing import Any

from search.policies.adaptive import Adaptive
from search.policies.policy import LevelPolicy
from search.policies.registry import POLICIES
from search.policies.visit_counts import ExpansionBudget
from search.spec import SearchSpec
from server.api_errors import bad_value
from server.api_keys import ApiKey


def apply_limits(
    spec: SearchSpec, key: ApiKey, *, seed: int, trajectory_tokens: int | None = None
) -> SearchSpec:
    """The spec with a seed and within the key's limits. Raises ApiError naming a field over one.

    ``seed`` is used if the spec has none; of two limits on a trajectory the smaller holds. Defaults
    are lowered to the limit silently; a field that the client has set over its limit is refused.
    """
    set_fields = spec.model_fields_set
    changes: dict[str, Any] = {}
    for name, most in (("width", key.width), ("max_depth", key.depth)):
        if name in set_fields:
            _must_not_exceed(name, getattr(spec, name), most)
        elif getattr(spec, name) > most:
            changes[name] = most
    if spec.seed is None:
        changes["seed"] = seed
    if trajectory_tokens is not None:
        limit = spec.trajectory_tokens if "trajectory_tokens" in set_fields else trajectory_tokens
        changes["trajectory_tokens"] = min(limit, trajectory_tokens)
    limited_spec = spec.model_copy(update=changes)
    if spec.max_tokens is not None:
        _must_not_exceed("max_tokens", spec.max_tokens, key.tree_tokens)
    elif most_tokens(limited_spec) > key.tree_tokens:
        limited_spec = limited_spec.model_copy(update={"max_tokens": key.tree_tokens})
    return limited_spec


def lower_to_limits(fields: dict[str, Any], key: ApiKey) -> dict[str, Any]:
    """Lower fields that the client did not set itself to the key's limits."""
    most = {"width": key.width, "max_depth": key.depth, "max_tokens": key.tree_tokens}
    return {
        name: min(value, most[name]) if name in most and value is not None else value
        for name, value in fields.items()
    }


def most_tokens(spec: SearchSpec) -> int:
    """The most tokens that a tree can have: every round at full width, every step at full length.

    No round draws more children than the width. A policy that goes level by level has one round a
    level, and as many again when it restarts at the root; one with an expansion budget has more
    rounds, but draws no more steps than the budget. Chains and the tree that they seed share the
    width.
    """
    step = min(spec.step_tokens or spec.max_step_tokens, spec.trajectory_tokens)
    policy = POLICIES[spec.policy](spec)
    restarts = policy.restarts if isinstance(policy, LevelPolicy | Adaptive) else None
    starts = 1 if restarts is None else restarts.most_starts
    by_expansions = isinstance(policy, ExpansionBudget)
    nodes = spec.expansions * spec.branch if by_expansions else spec.width * spec.max_depth * starts
    most = nodes * step
    return most if spec.max_tokens is None else min(most, spec.max_tokens)


def _must_not_exceed(name: str, value: int, most: int) -> None:
    if value > most:
        raise bad_value(f"search.{name}", f"at most {most} on this server, got {value}")
