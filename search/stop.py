"""When a search is over, and why: whichever of these is met first.

``answered``: as many trajectories as the width says have ended by themselves, or as many as a
policy finds enough. ``depth``: nothing is left to expand, and a trajectory was cut at
``max_depth``. ``width_spent``: nothing is left to expand, and trajectories were cut by their token
or context limit, or their last branches died empty or looping; or a backtracking search has spent
its ``expansions``, which bound its breadth as the width does. ``max_tokens``: the next child does
not fit into ``max_tokens`` generated tokens. ``kv``: the paths of the nodes that may still grow
hold more than ``max_kv_tokens``, equal prefixes counted once. ``deadline``: the time is up; the
round under way is dropped. ``consensus``: the votes still out cannot change the answer.
``cancelled``: said by whoever cancelled the search; a cancelled one has no outcome of its own.
"""

from __future__ import annotations

from collections.abc import Callable

from search.policies.policy import Backtracking, Policy
from search.spec import SearchSpec, StopReason
from search.tree import Finish, Tree


def budget_met(tree: Tree, spec: SearchSpec, held: Callable[[], int]) -> StopReason | None:
    """The logical budget that leaves no room for another round, if one does.

    ``held`` counts the tokens of KV that the search needs to go on.
    """
    if spec.max_tokens is not None and tree.generated_tokens >= spec.max_tokens:
        return StopReason.MAX_TOKENS
    if spec.max_kv_tokens is not None and held() > spec.max_kv_tokens:
        return StopReason.KV
    return None


def why_done(tree: Tree, spec: SearchSpec, policy: Policy) -> StopReason:
    """Why a policy plans nothing more: answered, depth or width_spent."""
    if isinstance(policy, Backtracking) and (reason := policy.stopped(tree)) is not None:
        return reason
    finished = tree.finished()
    cut = [node for node in finished if node.finish is Finish.LIMIT]
    if any(node.depth >= spec.max_depth for node in cut):
        return StopReason.DEPTH
    if cut or len(finished) < spec.width:
        return StopReason.WIDTH_SPENT
    return StopReason.ANSWERED
