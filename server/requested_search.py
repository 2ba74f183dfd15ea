"""Makes a request's search from its own fields, a model alias, ``auto`` or a reasoning effort."""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Mapping
from typing import Any, get_args

from search.engine import Capabilities, LogitsParams
from search.outcome_rewards import OUTCOME_POLICY, outcome_policies, outcome_refusal
from search.policies.policy import Scores
from search.reward_needs import field_in_need
from search.spec import AUTO_POLICY, PolicyName, RequestedSearch, SearchSpec
from search.vote import CONFIDENCES
from server.api_errors import ApiError, bad_value, echo, unsupported
from server.api_keys import ApiKey
from server.limits import apply_limits, lower_to_limits
from server.request_models import Effort, GenerationRequest
from server.reward_settings import judged
from server.service import Service
from server.settings import Settings
from server.tuned import TunedSearches

EFFORT_POLICY: PolicyName = "ets"
"""The policy behind ``reasoning_effort``: the one place to change it."""
EFFORT_WIDTH = {"low": 4, "medium": 16, "high": 64, "xhigh": 256}
LISTED_WIDTHS = (4, 16, 64)
SEEDS = 2**63


def spec_of(
    request: GenerationRequest,
    by_effort: dict[str, Any] | None,
    service: Service,
    key: ApiKey,
    limit: int | None,
) -> SearchSpec | None:
    """The search asked for by ``search`` or alias, else by effort; None for a plain reply."""
    alias = resolve_model(request.model, service.settings)
    if request.search is not None or alias:
        spec = merged_spec(request.search or RequestedSearch(), alias, service, key)
    elif by_effort is not None:
        spec = SearchSpec(**lower_to_limits(by_effort, key))
    else:
        return None
    if request.ignore_eos:
        spec = spec.model_copy(update={"ignore_eos": True})
    limits = [most for most in (limit, request.thinking_token_budget) if most is not None]
    return settle(request.fill(spec), service, key, seed_of(request), min(limits, default=None))


def merged_spec(
    search: RequestedSearch, defaults: dict[str, Any], service: Service, key: ApiKey
) -> SearchSpec:
    """``search``, with ``defaults`` for fields it does not set; ``auto`` becomes the search that it
    stands for, within the key's limits. Raises ValidationError if the fields do not fit."""

    def auto() -> dict[str, Any]:
        able = service.runner.engine.capabilities
        return lower_to_limits(auto_fields(service.settings, able, service.tuned), key)

    fields = without_auto(search.model_dump(exclude_unset=True), auto)
    return SearchSpec(**(without_auto(defaults, dict if "policy" in fields else auto) | fields))


def settle(
    spec: SearchSpec, service: Service, key: ApiKey, seed: int, limit: int | None = None
) -> SearchSpec:
    """The spec with a seed, within the key's limits. Raises ApiError naming a field over one, or
    one that needs rewards, log-probabilities or parameters that the engine does not support.

    If no policy is set, a search with an outcome model gets OUTCOME_POLICY."""
    able = service.runner.engine.capabilities
    if able.outcome and "policy" not in spec.model_fields_set:
        spec = spec.model_copy(update={"policy": OUTCOME_POLICY})
    spec = apply_limits(spec, key, seed=seed, trajectory_tokens=limit)
    field = field_in_need(spec, Scores.FINISHED)
    if field is not None and not able.scores:
        rule = "this server has no reward model; self_consistency with vote majority needs none"
        raise bad_value(f"search.{field}", rule)
    if able.outcome and (refusal := outcome_refusal(spec)) is not None:
        raise bad_value(f"search.{refusal[0]}", refusal[1])
    if spec.vote in CONFIDENCES and not able.step_logprobs:
        raise bad_value(
            "search.vote", f"this server's steps have no log-probabilities: {spec.vote}"
        )
    if spec.temperature > able.most_temperature:
        rule = f"at most {able.most_temperature:g} on the {able.engine} engine"
        raise bad_value("search.temperature", f"{rule}, got {spec.temperature:g}")
    most, vocab = spec.trajectory_tokens, service.text.model_vocab
    must_be_honoured(spec.logits_params, able, vocab=vocab, most=most, prefix="search.")
    return spec


def plain_params(request: GenerationRequest, tokens: int, service: Service) -> LogitsParams:
    """The sampling parameters of a plain reply of at most ``tokens`` tokens. Raises ApiError."""
    if request.thinking_token_budget is not None:
        raise unsupported("thinking_token_budget", "leave it out without a search")
    able, vocab = service.runner.engine.capabilities, service.text.model_vocab
    params = request.logits_params()
    must_be_honoured(params, able, vocab=vocab, most=tokens)
    return params


def must_be_honoured(
    params: LogitsParams, able: Capabilities, *, vocab: int, most: int, prefix: str = ""
) -> None:
    """Raise ApiError for parameters that this engine does not apply over a whole reply, token ids
    outside ``vocab``, and ``min_tokens`` over ``most``. ``prefix``: put before field names.
    """
    for name in params.active():
        if name not in able.logits_params:
            why = f"the {able.engine} engine does not honour it over a whole reply; leave it out"
            raise unsupported(prefix + name, why)
    for token, _ in params.logit_bias:
        if token >= vocab:
            raise bad_value(f"{prefix}logit_bias", f"ids are from 0 to {vocab - 1}, got {token}")
    if params.min_tokens > most:
        rule = f"at most {most}, as a reply has no more tokens"
        raise bad_value(f"{prefix}min_tokens", f"{rule}, got {params.min_tokens}")


def seed_of(request: GenerationRequest) -> int:
    """The request's seed modulo SEEDS, or a random one."""
    return secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS


def resolve_model(name: str, settings: Settings) -> dict[str, Any]:
    """The search fields of an alias such as ``sprig:rebase-16``; {} for the model's own name.

    Raises ApiError (404) if there is no such model.
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
    """The model's name and its listed aliases; ``outcome``: it has an outcome reward model."""
    aliases = [
        f"{settings.model}:{policy}-{width}"
        for policy in (outcome_policies() if outcome else get_args(PolicyName))
        for width in LISTED_WIDTHS
        if width <= settings.max_width
    ]
    return [settings.model, f"{settings.model}:{AUTO_POLICY}", *aliases]


def auto_fields(
    settings: Settings, able: Capabilities, tuned: TunedSearches | None
) -> dict[str, Any]:
    """The search fields that policy ``auto`` stands for: those of the tuned file; without one the
    policy that suits the reward model, or self_consistency if nothing judges replies."""
    if tuned is not None and tuned.auto is not None:
        return tuned.auto.fields
    if not judged(settings, able):
        return {"policy": "self_consistency"}
    return {"policy": OUTCOME_POLICY if able.outcome else "adaptive"}


def effort_fields(
    effort: Effort, able: Capabilities, tuned: TunedSearches | None
) -> dict[str, Any] | None:
    """The fields of the search behind a ``reasoning_effort``, None for a plain reply."""
    for name, search in ({} if tuned is None else tuned.reasoning_effort).items():
        if name == effort:
            return search.fields
    if effort not in EFFORT_WIDTH:
        return None
    policy = OUTCOME_POLICY if able.outcome else EFFORT_POLICY
    return {"policy": policy, "width": EFFORT_WIDTH[effort]}


def without_auto(spec: Mapping[str, Any], auto: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
    """The search fields ``spec``; if its policy is ``auto``, those of ``auto()`` fill in what is
    not set."""
    if spec.get("policy") != AUTO_POLICY:
        return dict(spec)
    return {**auto(), **{name: value for name, value in spec.items() if name != "policy"}}


def spec_to_run(
    spec: SearchSpec, settings: Settings, able: Capabilities, tuned: TunedSearches | None
) -> SearchSpec:
    """The search that is run for ``spec``: with the actual policy in place of ``auto``."""
    fields = spec.model_dump(exclude_unset=True)
    return SearchSpec(**without_auto(fields, lambda: auto_fields(settings, able, tuned)))
