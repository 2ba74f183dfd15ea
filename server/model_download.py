"""Provides the files of the models that the settings name: downloads them from the hub, or makes
those of a bundled model. Files that are complete here are used as they are, without network."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from models.bundled import BUNDLED_MODELS, bundled_name
from models.catalog import hub_name, public_policy
from runtime.checkpoint import config_of
from server.model_settings import bundled
from server.reward_settings import known_format
from server.setting_types import OTHERS_RUN
from server.settings import Settings, SettingsError, option, settings_by_name, variable

log = logging.getLogger("hedgerow")

DESCRIPTION = ("*.json", "*.jinja", "*.model", "*.txt")
"""Configuration and tokenizer, which decide whether the weights can be used here at all."""
WEIGHTS, OLD_WEIGHTS = "*.safetensors", "*.bin"


HUB_SECONDS = 10.0
"""The most seconds to wait for the hub's first answer, which never comes without a network."""


def with_models(settings: Settings, *, weights: bool = True) -> Settings:
    """Get the models' files; return the settings with the values that follow from them.

    Weights are downloaded last: a model that cannot run here is refused before, and models of
    running servers need no weights here. Raises SettingsError naming the key, what was tried and
    how to go on.
    """
    settings = _with_bundled_files(settings)
    weights = weights and settings.engine_way not in OTHERS_RUN
    revisions = {"policy_model": settings.revision, "reward_model": settings.reward_revision}
    for patterns in (DESCRIPTION, (WEIGHTS,)) if weights else (DESCRIPTION,):
        missing = {
            key: name for key in _keys(settings) if (name := _missing(settings, key, weights))
        }
        for key, name in missing.items():
            _download(key, name, revisions.get(key), patterns)
        if missing:
            settings = _reloaded(settings, missing)
        known_format(settings)
    return settings


def _keys(settings: Settings) -> Iterator[str]:
    """Yield the names of the settings whose checkpoints will be loaded."""
    yield from ("policy_model", "reward_model")
    if settings.draft != "off":
        yield "draft_model"
    if settings.embedder == "encoder":
        yield "encoder"


def _missing(settings: Settings, key: str, weights: bool) -> str | None:
    """The hub's name of a model if files of it are missing (without ``weights``: config.json)."""
    checkpoint: Path | None = getattr(settings, key)
    name = None if checkpoint is None else hub_name(checkpoint)
    if checkpoint is None or name is None:
        return None
    complete = is_whole(checkpoint) if weights else (checkpoint / "config.json").is_file()
    return None if complete else name


def is_whole(folder: Path) -> bool:
    """Whether a checkpoint's folder has its configuration and all of its weights."""
    if not (folder / "config.json").is_file():
        return False
    for ending in ("safetensors", "bin"):
        stem = "model" if ending == "safetensors" else "pytorch_model"
        index = folder / f"{stem}.{ending}.index.json"
        if index.is_file():
            parts = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
            if all((folder / part).is_file() for part in parts):
                return True
        elif (folder / f"{stem}.{ending}").is_file():
            return True
    return False


def _download(key: str, name: str, revision: str | None, patterns: tuple[str, ...]) -> None:
    """Download the files of a model that match ``patterns``, with progress on stderr."""
    from huggingface_hub import HfApi, snapshot_download

    with _explained(key, name, revision):
        log.info("%s: downloading %s", name, ", ".join(patterns))
        HfApi().model_info(name, revision=revision, timeout=HUB_SECONDS)  # fails fast: no retries
        folder = Path(snapshot_download(name, revision=revision, allow_patterns=[*patterns]))
        if WEIGHTS in patterns and not is_whole(folder):
            snapshot_download(name, revision=revision, allow_patterns=[OLD_WEIGHTS])


@contextmanager
def _explained(key: str, name: str, revision: str | None) -> Iterator[None]:
    """Turn errors of the hub's client into SettingsError: setting, problem and how to go on."""
    from httpx2 import TransportError  # the hub's client passes it on as it is
    from huggingface_hub import errors
    from huggingface_hub.constants import is_offline_mode

    command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
    try:
        yield
    except errors.GatedRepoError:
        problem = (
            f"its license is to be accepted at https://huggingface.co/{name}; then: hf auth login"
        )
    except errors.RevisionNotFoundError:
        problem = f"it has no revision {revision!r} on the hub"
    except errors.RepositoryNotFoundError:
        problem = "neither a folder nor a model on the hub; for a private one: hf auth login"
    except (errors.LocalEntryNotFoundError, ConnectionError, TransportError) as error:
        why = "HF_HUB_OFFLINE is set" if is_offline_mode() else f"no answer ({_cause(error)})"
        problem = (
            f"neither a folder nor downloaded, and the hub cannot be asked: {why}; where there "
            f"is a network: {command}; or name a folder"
        )
    except (errors.HfHubHTTPError, errors.EntryNotFoundError, OSError, ValueError) as error:
        problem = f"it cannot be downloaded: {str(error).splitlines()[0]}"
    else:
        return
    raise SettingsError(f"{variable(key)} = '{name}': {problem}")


def _cause(error: BaseException) -> str:
    """The class name of the error that first caused this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return type(error).__name__


def what_follows(settings: Settings) -> str | None:
    """A line on the settings derived from the models; None if all models are bundled ones."""
    bundle = bundled(settings.policy_model)
    if bundle is not None and settings.reward_model == bundle.reward:
        return None
    config = config_of(settings.policy_model)
    context = config.get("max_position_embeddings")
    reasons = {
        "model": "",
        "profile": _catalog_note(public_policy(settings.policy_model) or bundle),
        "engine": f" ({settings.engine_way})",
        "reward_model": "",
        "reward_format": "" if settings.reward_model is None else _catalog_note(True),
    }
    defaults = [
        f"{option(name)} {getattr(settings, name) or 'none'}{why}"
        for name, why in reasons.items()
        if name not in settings.model_fields_set
    ]
    kind = ", ".join(config.get("architectures") or ["no class named"])
    bundle_name = settings.model if settings.model in BUNDLED_MODELS else None
    name = bundle_name or hub_name(settings.policy_model)
    return (
        f"{name or settings.policy_model}: {kind}, context {context}; "
        f"not set, so taken: {', '.join(defaults) or 'nothing'}"
    )


def _catalog_note(row: object) -> str:
    return " (by docs/models.md)" if row else " (not in docs/models.md: any chat model's)"


def _with_bundled_files(settings: Settings) -> Settings:
    """The settings with the files of a bundled model, which are made at its first start."""
    name = bundled_name(settings.policy_model)
    policy = BUNDLED_MODELS[name].policy if name else None
    if name is None or not callable(policy):
        return settings
    try:
        folder = policy()
    except (OSError, ValueError) as error:
        raise SettingsError(f"{variable('policy_model')} = '{name}': {error}") from error
    derived = {key: getattr(settings, key) for key in ("model", "profile", "engine")}
    return _reloaded(settings, derived | {"policy_model": folder})


def _reloaded(settings: Settings, changes: dict[str, Any]) -> Settings:
    """The settings with ``changes``; those on ``auto`` are derived anew from the files now here."""
    return settings_by_name(settings.model_dump(exclude_unset=True) | changes)
