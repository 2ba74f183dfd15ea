"""When a search is over, and why."""

from __future__ import annotations

from search.spec import SearchSpec, StopReason
from search.tree import Finish, Tree


def budget_met(tree: Tree, spec: SearchSpec) -> StopReason | None:
    """The logical budget that leaves no room for another round, if one does.

    ``max_tokens``: as many tokens are generated as may be. ``kv``: the paths of the open leaves
    hold more tokens than ``max_kv_tokens``.
    """
    if spec.max_tokens is not None and tree.generated_tokens >= spec.max_tokens:
        return StopReason.MAX_TOKENS
    if spec.max_kv_tokens is not None and tree.live_tokens() > spec.max_kv_tokens:
        return StopReason.KV
    return None


def why_done(tree: Tree, spec: SearchSpec) -> StopReason:
    """Why a policy has nothing left to expand.

    ``answered``: as many trajectories as the width says ended by themselves. ``depth``: at least
    one was cut at ``max_depth``. ``width_spent``: otherwise, that is, some were cut by their token
    or context limit, or their last branches died empty or looping.
    """
    finished = tree.finished()
    cut = [node for node in finished if node.finish is Finish.LIMIT]
    if any(node.depth >= spec.max_depth for node in cut):
        return StopReason.DEPTH
    if cut or len(finished) < spec.width:
        return StopReason.WIDTH_SPENT
    return StopReason.ANSWERED
