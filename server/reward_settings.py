"""What judges steps, as the settings say it."""

from __future__ import annotations

from models.catalog import hub_name
from runtime.checkpoint import architecture
from runtime.reward_format import REWARD_FORMATS, reward_format
from runtime.verifiers.verifier import URLS
from search.engine import Capabilities
from server.model_settings import AUTO, served_name
from server.settings import Settings, SettingsError, variable


def known_format(settings: Settings) -> str:
    """The reward format. Raises SettingsError where none follows from the reward model."""
    if settings.reward_format != AUTO:
        return settings.reward_format
    kind = architecture(settings.reward_model) if settings.reward_model else None
    raise SettingsError(
        f"{variable('reward_format')} = 'auto': nothing is known of {settings.reward_model} "
        f"({kind or 'it names no class'}); set one of {', '.join(REWARD_FORMATS)}, or a .json file"
    )


def verified_alone(settings: Settings) -> bool:
    """Whether rewards would be the policy's log-probabilities, for which a verifier stands in."""
    form = reward_format(known_format(settings))
    return form.reads == "logprob" or (form.needs_model and settings.reward_model is None)


def judged(settings: Settings, able: Capabilities) -> bool:
    """Whether anything judges replies, not the policy model's own log-probabilities alone."""
    return able.scores and (settings.verifier is not None or not verified_alone(settings))


def judges(settings: Settings) -> dict[str, str | None]:
    """The names of the reward model and of the verifier, not where the operator has them."""
    prm, verifier = settings.reward_model, settings.verifier
    return {
        "reward_model": prm and (hub_name(prm) or "/".join(prm.parts[-2:])),
        "verifier": "endpoint" if (verifier or "").startswith(URLS) else verifier,
    }


def models_of(settings: Settings) -> dict[str, str | None]:
    """The names of the models and of the verifier, as a tuned file has them."""
    return {"policy_model": served_name(settings.policy_model), **judges(settings)}
