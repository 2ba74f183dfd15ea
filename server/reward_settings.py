"""Which reward model and verifier judge steps, according to the settings."""

from __future__ import annotations

from models.catalog import hub_name
from runtime.checkpoint import architecture
from runtime.reward_format import REWARD_FORMATS, reward_format
from runtime.verifiers.verifier import URLS
from search.engine import Capabilities
from server.model_settings import AUTO, served_name
from server.settings import Settings, SettingsError, variable


def known_format(settings: Settings) -> str:
    """The reward format. Raises SettingsError if it is ``auto`` for an unknown reward model."""
    if settings.reward_format != AUTO:
        return settings.reward_format
    kind = architecture(settings.reward_model) if settings.reward_model else None
    raise SettingsError(
        f"{variable('reward_format')} = 'auto': nothing is known of {settings.reward_model} "
        f"({kind or 'it names no class'}); set one of {', '.join(REWARD_FORMATS)}, or a .json file"
    )


def verified_alone(settings: Settings) -> bool:
    """Whether rewards are the policy's log-probabilities, which a verifier's would replace."""
    form = reward_format(known_format(settings))
    return form.reads == "logprob" or (form.needs_model and settings.reward_model is None)


def judged(settings: Settings, able: Capabilities) -> bool:
    """Whether replies are judged by more than the policy model's own log-probabilities."""
    return able.scores and (settings.verifier is not None or not verified_alone(settings))


def judges(settings: Settings) -> dict[str, str | None]:
    """The names of the reward model and the verifier, without the operator's paths and URLs."""
    prm, verifier = settings.reward_model, settings.verifier
    return {
        "reward_model": prm and (hub_name(prm) or "/".join(prm.parts[-2:])),
        "verifier": "endpoint" if (verifier or "").startswith(URLS) else verifier,
    }


def models_of(settings: Settings) -> dict[str, str | None]:
    """The names of the models and the verifier, as a tuned file records them."""
    return {"policy_model": served_name(settings.policy_model), **judges(settings)}
