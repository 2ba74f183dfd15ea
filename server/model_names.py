"""How models are called: by their names, and by aliases that ask for a search."""

from __future__ import annotations

import re
from typing import Any, get_args

from search.outcome_rewards import outcome_policies
from search.spec import AUTO_POLICY, PolicyName
from server.api_errors import ApiError, echo
from server.settings import Settings

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
