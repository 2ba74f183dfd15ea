"""Every policy by the name that a client uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from search.policies.adaptive import Adaptive
from search.policies.beam import Beam
from search.policies.best_first import BestFirst
from search.policies.best_of_n import BestOfN
from search.policies.dora import Dora
from search.policies.dvts import Dvts
from search.policies.ets import Ets
from search.policies.mcts import Mcts
from search.policies.particle_filter import ParticleFilter
from search.policies.policy import BacktrackingPolicy, LevelPolicy, Policy
from search.policies.rebase import Rebase
from search.policies.self_consistency import SelfConsistency
from search.policies.tot_bfs import TotBfs
from search.spec import PolicyName, SearchSpec

POLICIES: Mapping[PolicyName, Callable[[SearchSpec], Policy]] = {
    "best_of_n": BestOfN.from_spec,
    "self_consistency": SelfConsistency.from_spec,
    "beam": Beam.from_spec,
    "dvts": Dvts.from_spec,
    "particle_filter": ParticleFilter.from_spec,
    "rebase": Rebase.from_spec,
    "dora": Dora.from_spec,
    "ets": Ets.from_spec,
    "ets_kv": Ets.without_clusters,
    "best_first": BestFirst.from_spec,
    "mcts": Mcts.from_spec,
    "tot_bfs": TotBfs.from_spec,
    "adaptive": Adaptive.from_spec,
}


def returns_to_root(policy: Policy) -> bool:
    """Whether the policy may expand the root again at any time, so that no path is ruled out."""
    starts_again = isinstance(policy, LevelPolicy) and policy.restarts is not None
    return starts_again or isinstance(policy, BacktrackingPolicy)
