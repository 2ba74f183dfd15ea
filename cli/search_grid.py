"""The searches that ``hedgerow tune`` tries: policies, widths, temperatures and votes, crossed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from search.engine import Capabilities, EngineError
from search.outcome_rewards import outcome_refusal
from search.policies.policy import EmbeddingPolicy, Scores
from search.policies.registry import POLICIES
from search.reward_needs import needed_scores
from search.spec import PolicyName, SearchSpec, VoteName
from search.vote import vote_name
from server.reward_settings import judged
from server.settings import Settings

USUAL_POLICIES: Sequence[PolicyName] = (
    "self_consistency",
    "best_of_n",
    "adaptive",
    "rebase",
    "dora",
    "ets",
    "particle_filter",
    "dvts",
    "beam",
)
"""Of policies with equal accuracy and tokens the first in this order is chosen. The help of
``hedgerow tune`` names them, and USUAL_VOTES."""
USUAL_VOTES: Sequence[VoteName] = ("weighted_majority", "majority", "lineages", "best_last")
CHAINS: PolicyName = "self_consistency"
"""The policy without rewards: it only takes a majority vote, and one chain is a plain reply."""

MakeSpec = Callable[[str, int, str, float], SearchSpec]
"""Makes a search from policy, width, vote and temperature."""


def crossed(
    policies: Sequence[str],
    widths: Sequence[int],
    votes: Sequence[str],
    temperatures: Sequence[float],
    make: MakeSpec,
) -> list[SearchSpec]:
    """All searches of the grid. CHAINS is also tried at width 1, as a plain reply; beside it other
    policies are not, because at width 1 they all are one chain."""
    specs = [
        make(policy, width, vote, temperature)
        for policy in policies
        for width in sorted({1, *widths} if policy == CHAINS else set(widths))
        if width > 1 or policy == CHAINS or CHAINS not in policies
        for temperature in temperatures
        for vote in (("majority",) if policy == CHAINS else votes)
    ]
    return list({spec.model_dump_json(): spec for spec in specs}.values())


def possible(
    specs: Sequence[SearchSpec], settings: Settings, able: Capabilities
) -> tuple[list[SearchSpec], dict[str, str]]:
    """The searches that the models support, and for the others, by policy and vote, the reason."""
    able_specs, refusals = [], {}
    for spec in specs:
        why = _refusal(spec, settings, able)
        if why is None:
            able_specs.append(spec)
        else:
            refusals[f"{spec.policy} with vote {vote_name(spec)}"] = why
    return able_specs, refusals


def _refusal(spec: SearchSpec, settings: Settings, able: Capabilities) -> str | None:
    if needed_scores(spec) is not Scores.NONE and not judged(settings, able):
        return "it needs rewards, and there is neither a reward model nor a verifier"
    if able.outcome and (refusal := outcome_refusal(spec)) is not None:
        return refusal[1]
    policy = POLICIES[spec.policy](spec)
    if isinstance(policy, EmbeddingPolicy):
        try:
            policy.suited_to(able.embeds)
        except EngineError as error:
            return str(error)
    return None
