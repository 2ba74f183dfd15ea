"""Derives the settings that are on ``auto`` from the models that are named.

Nothing is downloaded here, and no weights are read.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Literal

from models.bundled import BUNDLED_MODELS, BundledModel, bundled_name
from models.catalog import hub_name, public_policy, public_reward_model
from runtime.checkpoint import config_of
from runtime.embedded.model.config import ModelConfig, UnsupportedModel, weight_bytes
from server import machine

AUTO = "auto"
PLAIN_PROFILE = "chat"
FLOAT_BYTES = 4
_NOT_IN_A_NAME = re.compile(r"[^A-Za-z0-9._-]+")


def bundled(policy: Path | None) -> BundledModel | None:
    """The bundled model whose checkpoint ``policy`` is; None if it is not a bundled one."""
    name = bundled_name(policy)
    return None if name is None else BUNDLED_MODELS[name]


def served_name(policy: Path | None) -> str:
    """The name to serve a model by: its bundled name, its name on the hub, or the folder's."""
    if policy is None:
        return "model"
    name = bundled_name(policy) or hub_name(policy)
    return name or _NOT_IN_A_NAME.sub("-", policy.resolve().name).strip("-._") or "model"


def profile_of(policy: Path | None) -> str:
    """The profile of a known policy model; PLAIN_PROFILE for any other."""
    if policy is None:
        return PLAIN_PROFILE
    bundle, row = bundled(policy), public_policy(policy)
    return bundle.profile if bundle else row.profile if row else PLAIN_PROFILE


def format_of(policy: Path | None, reward: Path | None) -> str:
    """The reward format of a known reward model, ``none`` without one, ``auto`` if unknown."""
    if reward is None:
        return "none"
    bundle, row = bundled(policy), public_reward_model(reward)
    if bundle and reward == bundle.reward:
        return bundle.reward_format
    return row.format if row else AUTO


def engine_for(
    policy: Path | None, reward: Path | None, python: Path
) -> Literal["embedded", "sglang"]:
    """The engine for models if neither ``--launch`` nor URLs decide it.

    ``python``: that of SGLang's environment, which may not exist. Raises ValueError, with the line
    to type, for models that no engine can run here.
    """
    if policy is None or bundled(policy):
        return "embedded"
    if machine.cuda_devices() and python.is_file():
        return "sglang"
    size = 0
    for checkpoint in [policy] if reward is None else [policy, reward]:
        try:
            size += _embedded_bytes(checkpoint)
        except UnsupportedModel as error:
            raise ValueError(
                f"{_name(checkpoint)}: {error}; {_elsewhere(policy, python)}"
            ) from None
    free = machine.free_memory()
    if free is not None and size > free:
        raise ValueError(
            f"{_name(policy)}: {size / 1e9:.1f} GB of weights in float32 on the embedded engine, "
            f"{free / 1e9:.1f} GB of memory is free; {_elsewhere(policy, python)}"
        )
    return "embedded"


def _embedded_bytes(checkpoint: Path) -> int:
    """The bytes of a checkpoint's weights on the embedded engine; 0 if it is not here yet."""
    if not config_of(checkpoint):
        return 0
    return weight_bytes(ModelConfig.from_checkpoint(checkpoint), FLOAT_BYTES)


def _name(checkpoint: Path) -> str:
    return hub_name(checkpoint) or str(checkpoint)


def _elsewhere(policy: Path, python: Path) -> str:
    """A hint how to run the model with SGLang instead."""
    name = _name(policy)
    if machine.cuda_devices():
        return (
            f"there is a CUDA device, but no SGLang at {python}: "
            "pip install sglang, then: pip install --no-deps ./deploy/sglang-plugin; "
            "or set HEDGEROW_LAUNCH_PYTHON to the Python that has both"
        )
    return (
        "there is no CUDA device here; where there is one: "
        f"python -m sglang.launch_server --model-path {name} --enable-metrics; here then: "
        f"hedgerow serve {name} --policy-url http://HOST:30000"
    )
