"""A search's spec within what its key may ask for."""

from __future__ import annotations

from typing import Any

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
    longest = spec.trajectory_tokens
    if trajectory_tokens is not None:
        own = longest if "trajectory_tokens" in given else trajectory_tokens
        longest = changes["trajectory_tokens"] = min(own, trajectory_tokens)
    if spec.max_tokens is not None:
        _must_not_exceed("max_tokens", spec.max_tokens, key.tree_tokens)
    elif changes.get("width", spec.width) * longest > key.tree_tokens:
        changes["max_tokens"] = key.tree_tokens
    return spec.model_copy(update=changes)


def _must_not_exceed(name: str, value: int, most: int) -> None:
    if value > most:
        raise bad_value(f"search.{name}", f"at most {most} on this server, got {value}")
