"""A search's spec within what its key may ask for."""

from __future__ import annotations

from typing import Any

from search.policies.policy import BacktrackingPolicy
from search.policies.registry import POLICIES
from search.spec import SearchSpec
from server.errors import bad_value
from server.keys import Key


def settle(
    spec: SearchSpec, key: Key, *, seed: int, trajectory_tokens: int | None = None
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
