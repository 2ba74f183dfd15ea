"""Names that stand for searches: a model's aliases, policy ``auto`` and ``reasoning_effort``."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from typing import Any, get_args

from search.capabilities import Capabilities
from search.outcome_rewards import OUTCOME_POLICY, outcome_policies, outcome_refusal
from search.spec import AUTO_POLICY, PolicyName, SearchSpec
from server.api_errors import ApiError, echo
from server.limits import needs_rewards
from server.model_settings import served_name
from server.request_models import Effort
from server.reward_settings import judges, verified_alone
from server.settings import Settings, SettingsError, variable
from server.tuned import TunedSearch, TunedSearches, read_tuned

log = logging.getLogger("hedgerow")

EFFORT_POLICY: PolicyName = "ets"
"""The policy behind ``reasoning_effort``: the one place to change it."""
EFFORT_WIDTH = {"low": 4, "medium": 16, "high": 64, "xhigh": 256}
LISTED_WIDTHS = (4, 16, 64)


def resolve_model(name: str, settings: Settings) -> dict[str, Any]:
    """What an alias such as ``sprig:rebase-16`` asks of a search; {} for the model's own name.

    Raises ApiError when there is no such model.
    """
    if name == settings.model:
        return {}
    if name == f"{settings.model}:{AUTO_POLICY}":
        return {"policy": AUTO_POLICY}
    policies = "|".join((*get_args(PolicyName), AUTO_POLICY))
    alias = re.fullmatch(rf"{re.escape(settings.model)}:({policies})-([1-9]\d{{0,5}})", name)
    if alias is None or int(alias[2]) > settings.max_width:
        names = f"{settings.model!r} and aliases such as {settings.model + ':rebase-16'!r}"
        message = f"model: {echo(name)} does not exist; this server has {names}"
        raise ApiError(404, "model_not_found", message, param="model")
    return {"policy": alias[1], "width": int(alias[2])}


def model_names(settings: Settings, *, outcome: bool = False) -> list[str]:
    """The model and the aliases worth listing; ``outcome``: of its reward model."""
    aliases = [
        f"{settings.model}:{policy}-{width}"
        for policy in (outcome_policies() if outcome else get_args(PolicyName))
        for width in LISTED_WIDTHS
        if width <= settings.max_width
    ]
    return [settings.model, f"{settings.model}:{AUTO_POLICY}", *aliases]


def models_of(settings: Settings) -> dict[str, str | None]:
    """The names of the models and of the verifier, as a tuned file has them."""
    return {"policy_model": served_name(settings.policy_model), **judges(settings)}


def tuned_searches(settings: Settings, able: Capabilities) -> TunedSearches | None:
    """What the file of the settings says, None without one; a warning if it is of other models.

    Raises SettingsError for a search that needs rewards that the engine does not give.
    """
    if settings.tuned is None:
        return None
    tuned = read_tuned(settings.tuned)
    searches = {} if tuned.auto is None else {"auto": tuned.auto}
    searches |= {f"reasoning_effort.{name}": one for name, one in tuned.reasoning_effort.items()}
    for name, one in searches.items():
        if (refused := _refusal(one, able)) is not None:
            key = f"{variable('tuned')} = '{settings.tuned}'"
            raise SettingsError(f"{key}: {name}.search.{refused[0]}: {refused[1]}")
    if others := tuned.others_than(models_of(settings)):
        log.warning("%s was tuned on other models (%s)", settings.tuned, "; ".join(others))
    return tuned


def _refusal(one: TunedSearch, able: Capabilities) -> tuple[str, str] | None:
    """The field that the engine cannot do, and why."""
    if needs_rewards(one.search) and not able.scores:
        return "policy", f"{one.search.policy!r} and its vote need a reward model; there is none"
    return outcome_refusal(one.search) if able.outcome else None


def judged(settings: Settings, able: Capabilities) -> bool:
    """Whether anything judges replies, not the policy model's own log-probabilities alone."""
    return able.scores and (settings.verifier is not None or not verified_alone(settings))


def auto_fields(
    settings: Settings, able: Capabilities, tuned: TunedSearches | None
) -> dict[str, Any]:
    """The fields of a search that policy ``auto`` stands for: those of the tuned file; without one
    the policy that suits what judges steps, if anything does."""
    if tuned is not None and tuned.auto is not None:
        return tuned.auto.fields
    if not judged(settings, able):
        return {"policy": "self_consistency"}
    return {"policy": OUTCOME_POLICY if able.outcome else "adaptive"}


def effort_fields(
    effort: Effort, able: Capabilities, tuned: TunedSearches | None
) -> dict[str, Any] | None:
    """The fields of the search behind a ``reasoning_effort``, None for a plain reply."""
    for name, one in ({} if tuned is None else tuned.reasoning_effort).items():
        if name == effort:
            return one.fields
    if effort not in EFFORT_WIDTH:
        return None
    policy = OUTCOME_POLICY if able.outcome else EFFORT_POLICY
    return {"policy": policy, "width": EFFORT_WIDTH[effort]}


def without_auto(asked: Mapping[str, Any], auto: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """Fields of a search with those of ``auto`` in place of a policy of that name; what is asked
    wins."""
    if asked.get("policy") != AUTO_POLICY:
        return dict(asked)
    return {**auto(), **{name: value for name, value in asked.items() if name != "policy"}}


def what_is_run(
    asked: SearchSpec, settings: Settings, able: Capabilities, tuned: TunedSearches | None
) -> SearchSpec:
    """The search that is asked for, by a policy's own name."""
    fields = asked.model_dump(exclude_unset=True)
    return SearchSpec(**without_auto(fields, lambda: auto_fields(settings, able, tuned)))
