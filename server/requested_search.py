"""The search that a request asks for: what it says, what its model's name and the server say."""

from __future__ import annotations

import secrets
from typing import Any

from search.capabilities import Capabilities
from search.engine import LogitsParams
from search.outcome_rewards import OUTCOME_POLICY, outcome_refusal
from search.spec import RequestedSearch, SearchSpec
from search.vote import CONFIDENCES
from server.api_errors import bad_value, unsupported
from server.api_keys import ApiKey
from server.limits import apply_limits, lowered, needs_rewards, policy_needs_rewards
from server.request_models import GenerationRequest
from server.search_names import auto_fields, resolve_model, without_auto
from server.service import Service

SEEDS = 2**63


def spec_of(
    request: GenerationRequest,
    by_effort: dict[str, Any] | None,
    service: Service,
    key: ApiKey,
    limit: int | None,
) -> SearchSpec | None:
    """The search asked for: by field, then by alias, then by effort; None for a plain reply."""
    alias = resolve_model(request.model, service.settings)
    if request.search is not None or alias:
        spec = joined(request.search or RequestedSearch(), alias, service, key)
    elif by_effort is not None:
        spec = SearchSpec(**by_effort)
    else:
        return None
    if request.ignore_eos:
        spec = spec.model_copy(update={"ignore_eos": True})
    limits = [most for most in (limit, request.thinking_token_budget) if most is not None]
    return settled(request.joined(spec), service, key, seed_of(request), min(limits, default=None))


def joined(
    asked: RequestedSearch, others: dict[str, Any], service: Service, key: ApiKey
) -> SearchSpec:
    """What is asked, and ``others`` where it says nothing; ``auto`` is what it stands for, no wider
    than the key allows. Raises ValidationError if they do not fit."""

    def auto() -> dict[str, Any]:
        able = service.runner.engine.capabilities
        return lowered(auto_fields(service.settings, able, service.tuned), key)

    own = without_auto(asked.model_dump(exclude_unset=True), auto)
    return SearchSpec(**(without_auto(others, dict if "policy" in own else auto) | own))


def settled(
    spec: SearchSpec, service: Service, key: ApiKey, seed: int, limit: int | None = None
) -> SearchSpec:
    """The spec with a seed, within the key's limits. Raises ApiError naming what is over one, and
    for rewards or log-probabilities that are needed of an engine that does not give them.

    Without a word of a policy an outcome model gets the one that it is for."""
    able = service.runner.engine.capabilities
    if able.outcome and "policy" not in spec.model_fields_set:
        spec = spec.model_copy(update={"policy": OUTCOME_POLICY})
    spec = apply_limits(spec, key, seed=seed, trajectory_tokens=limit)
    if needs_rewards(spec) and not able.scores:
        name = "policy" if policy_needs_rewards(spec) else "vote"
        allowed = "this server has no reward model; self_consistency with vote majority needs none"
        raise bad_value(f"search.{name}", allowed)
    if able.outcome and (refused := outcome_refusal(spec)) is not None:
        raise bad_value(f"search.{refused[0]}", refused[1])
    if spec.vote in CONFIDENCES and not able.step_logprobs:
        raise bad_value(
            "search.vote", f"this server's steps have no log-probabilities: {spec.vote}"
        )
    if spec.temperature > able.most_temperature:
        allowed = f"at most {able.most_temperature:g} on the {able.engine} engine"
        raise bad_value("search.temperature", f"{allowed}, got {spec.temperature:g}")
    most, vocab = spec.trajectory_tokens, service.text.model_vocab
    must_be_honoured(spec.logits_params, able, vocab=vocab, most=most, prefix="search.")
    return spec


def plain_params(request: GenerationRequest, tokens: int, service: Service) -> LogitsParams:
    """What a plain reply of at most so many tokens is drawn by. Raises ApiError."""
    if request.thinking_token_budget is not None:
        raise unsupported("thinking_token_budget", "leave it out without a search")
    able, vocab = service.runner.engine.capabilities, service.text.model_vocab
    params = request.logits_params()
    must_be_honoured(params, able, vocab=vocab, most=tokens)
    return params


def must_be_honoured(
    params: LogitsParams, able: Capabilities, *, vocab: int, most: int, prefix: str = ""
) -> None:
    """Raise ApiError for what this engine does not honour over a whole reply, and for what cannot
    be: a token id from ``vocab`` on, more than ``most`` tokens. ``prefix``: of the fields' names.
    """
    for name in params.asked():
        if name not in able.logits_params:
            why = f"the {able.engine} engine does not honour it over a whole reply; leave it out"
            raise unsupported(prefix + name, why)
    for token, _ in params.logit_bias:
        if token >= vocab:
            raise bad_value(f"{prefix}logit_bias", f"ids are from 0 to {vocab - 1}, got {token}")
    if params.min_tokens > most:
        allowed = f"at most {most}, as a reply has no more tokens"
        raise bad_value(f"{prefix}min_tokens", f"{allowed}, got {params.min_tokens}")


def seed_of(request: GenerationRequest) -> int:
    """The seed that it names, or one drawn at random."""
    return secrets.randbelow(SEEDS) if request.seed is None else request.seed % SEEDS
