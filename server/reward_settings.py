"""What judges steps, as the settings say it."""

from __future__ import annotations

from models.catalog import hub_name
from runtime.checkpoint import architecture
from runtime.reward_format import REWARD_FORMATS, reward_format
from runtime.verifiers.verifier import URLS
from server.model_settings import AUTO
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


def judges(settings: Settings) -> dict[str, str | None]:
    """The names of the reward model and of the verifier, not where the operator has them."""
    prm, verifier = settings.reward_model, settings.verifier
    return {
        "reward_model": prm and (hub_name(prm) or "/".join(prm.parts[-2:])),
        "verifier": "endpoint" if (verifier or "").startswith(URLS) else verifier,
    }
