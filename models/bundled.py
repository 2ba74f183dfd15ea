"""The bundled models by the names that they are served under. To add one, add a row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

SPRIG_FOLDER = Path(__file__).parent / "sprig"


@dataclass(frozen=True, slots=True)
class BundledModel:
    """A policy model and what belongs to it; it runs on the embedded engine unless asked otherwise.

    ``policy``: its checkpoint's folder, or a function that makes the folder and returns it.
    ``profile``, ``reward_format``: names of ``runtime.profiles`` and ``runtime.reward_format``.
    """

    policy: Path | Callable[[], Path]
    reward: Path | None = None
    draft: Path | None = None
    profile: str = "chat"
    reward_format: str = "none"


def _smollm2() -> Path:
    from models.smollm2 import smollm2_folder  # slow to import, so only on use

    return smollm2_folder()


BUNDLED_MODELS: Mapping[str, BundledModel] = {
    "sprig": BundledModel(
        SPRIG_FOLDER / "policy",
        SPRIG_FOLDER / "prm",
        SPRIG_FOLDER / "draft",
        "sprig",
        "math-shepherd",
    ),
    "smollm2": BundledModel(_smollm2),
}


def bundled_name(policy: Path | None) -> str | None:
    """The name of the bundled model with this policy, given as its folder, or as its name if the
    folder is made on use; None for any other checkpoint."""
    for name, model in BUNDLED_MODELS.items():
        if policy == (Path(name) if callable(model.policy) else model.policy):
            return name
    return None
