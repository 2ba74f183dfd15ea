"""SmolLM2-135M-Instruct for tests: its weights loaded once, engines with any options over them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest

from models.smollm2 import NotInstalled, smollm2_folder
from runtime.embedded import engine_loop
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from tests.runtime.inline_engine_loop import InlineWorker

MakeEngine = Callable[..., InlineWorker]
"""An engine in this process; takes fields of EngineOptions over ``plain_options``."""


def folder_or_skip() -> Path:
    """The checkpoint's folder; without it, skip the test, naming the command that installs it."""
    try:
        return smollm2_folder()
    except NotInstalled as error:
        pytest.skip(str(error))


@cache
def loaded(folder: Path) -> Forward:
    """The checkpoint's forward pass, shared by engines because it keeps no KV of its own."""
    return Forward(folder, threads=(1, 2))


def plain_options(folder: Path) -> EngineOptions:
    """Options with every switch off: one branch at a time, room for all."""
    return EngineOptions(
        policy=folder,
        reward_format="none",
        kv_tokens=20_000,
        kv_policy="lru",
        batch_limit=1,
        dedup=False,
        lookahead=False,
        strict=True,
    )


def engine_maker(folder: Path, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    """A function that makes engines over the loaded weights."""
    monkeypatch.setattr(engine_loop, "Forward", lambda *_, **__: loaded(folder))
    plain = plain_options(folder)
    return lambda **changes: InlineWorker(replace(plain, **changes))


def first_layers(source: Path, folder: Path, layers: int) -> Path:
    """A checkpoint of the first ``layers`` layers: fast, and often different from the whole."""
    folder.mkdir()
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            (folder / path.name).symlink_to(path)
        elif path.name != "config.json":
            shutil.copy(path, folder / path.name)
    config = json.loads((source / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": layers}))
    return folder
