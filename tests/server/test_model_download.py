"""Models are downloaded at a start: what the hub is asked for, and what a failure says."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx2
import huggingface_hub
import pytest
from huggingface_hub import errors

from models.bundled import BUNDLED_MODELS, BundledModel
from server import machine
from server.model_download import is_whole, what_follows, with_models
from server.settings import SettingsError, load_settings
from tests.server.test_model_settings import TINY

REPLY: Any = type("Reply", (), {"headers": {}, "request": None, "status_code": 404})()


class Hub:
    """Public models by name, with a cache like the hub's own; ``downloads``: names and patterns."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache
        self.models: dict[str, dict[str, Any]] = {}
        self.downloads: list[tuple[str, list[str]]] = []
        self.revisions: set[str | None] = set()

    def folder(self, name: str) -> Path:
        """Return the folder of the model's files."""
        return self.cache / f"models--{name.replace('/', '--')}" / "snapshots" / "abc"

    def info(self, name: str, **_: object) -> None:
        """Stand in for ``HfApi.model_info``."""
        if name not in self.models:
            raise httpx2.ConnectError("no network")

    def snapshot(
        self,
        name: str,
        revision: str | None = None,
        allow_patterns: list[str] | None = None,
        local_files_only: bool = False,
    ) -> str:
        """Stand in for ``snapshot_download``."""
        folder = self.folder(name)
        if local_files_only:
            if not folder.is_dir():
                raise errors.LocalEntryNotFoundError("not here")
            return str(folder)
        self.revisions.add(revision)
        self.downloads.append((name, allow_patterns or []))
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in self.models[name].items():
            if any(Path(file).match(pattern) for pattern in allow_patterns or []):
                (folder / file).write_text(text if isinstance(text, str) else json.dumps(text))
        return str(folder)


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Hub:
    """A hub instead of the real one, on a machine without a GPU."""
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr(huggingface_hub, "snapshot_download", hub.snapshot)
    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", hub.info)
    monkeypatch.setattr(machine, "cuda_devices", lambda: ())
    return hub


def test_a_model_is_downloaded_once_its_weights_last(hub: Hub) -> None:
    """The settings follow from its files; a model that is whole is not asked for again."""
    hub.models["Me/own"] = {"config.json": TINY, "model.safetensors": "weights"}
    settings = load_settings({}, policy_model="Me/own", revision="v2")
    assert settings.policy_model == Path("Me/own")
    ready = with_models(settings)
    assert ready.policy_model == hub.folder("Me/own")
    assert (ready.model, ready.profile, ready.engine) == ("Me/own", "chat", "embedded")
    assert [patterns[0] for _, patterns in hub.downloads] == ["*.json", "*.safetensors"]
    assert hub.revisions == {"v2"}
    assert with_models(load_settings({}, policy_model="Me/own")) is not None
    assert len(hub.downloads) == 2


def test_what_cannot_run_here_is_not_downloaded(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """The configuration alone gives the model's size."""
    hub.models["Me/big"] = {"config.json": TINY | {"hidden_size": 8192}, "model.safetensors": ""}
    monkeypatch.setattr(machine, "free_memory", lambda: 1 << 20)
    with pytest.raises(SettingsError, match=r"Me/big.*GB of weights.*hedgerow serve Me/big"):
        with_models(load_settings({}, policy_model="Me/big"))
    assert [patterns[0] for _, patterns in hub.downloads] == ["*.json"]


def test_a_reward_model_says_its_format_once_it_is_here(hub: Hub) -> None:
    """Its class gives the format; weights of the old kind are taken if there are no new ones."""
    config = TINY | {"architectures": ["Qwen2ForPrmModel"]}
    hub.models["Me/prm"] = {"config.json": config, "pytorch_model.bin": "weights"}
    settings = load_settings({}, reward_model="Me/prm")
    assert settings.reward_format == "auto"
    assert with_models(settings).reward_format == "skywork"
    assert [patterns for _, patterns in hub.downloads][1:] == [["*.safetensors"], ["*.bin"]]


def test_of_a_running_servers_model_the_tokenizer_is_enough(hub: Hub) -> None:
    """That server has the weights; an unknown reward model is refused before its weights come."""
    hub.models["Me/own"] = {"config.json": TINY, "model.safetensors": "weights"}
    urls = load_settings({}, policy_model="Me/own", policy_urls="http://a:1")
    assert with_models(urls).engine_way == "--engine sglang with --policy-url"
    assert [patterns[0] for _, patterns in hub.downloads] == ["*.json"]
    with pytest.raises(SettingsError, match="HEDGEROW_REWARD_FORMAT = 'auto': nothing is known"):
        with_models(load_settings({}, reward_model="Me/own"))
    assert {patterns[0] for _, patterns in hub.downloads} == {"*.json"}


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (lambda: errors.LocalEntryNotFoundError("?"), "the hub cannot be asked: no answer"),
        (lambda: httpx2.ConnectTimeout("?"), "the hub cannot be asked: no answer (ConnectTimeout)"),
        (lambda: errors.OfflineModeIsEnabled("?"), "the hub cannot be asked: no answer"),
        (lambda: OSError("No space left"), "it cannot be downloaded: No space left"),
        (
            lambda: errors.GatedRepoError("?", response=REPLY),
            "license is to be accepted at https://hugging",
        ),
        (
            lambda: errors.RepositoryNotFoundError("?", response=REPLY),
            "neither a folder nor a model on",
        ),
        (
            lambda: errors.RevisionNotFoundError("?", response=REPLY),
            "has no revision 'v2' on the hub",
        ),
        (lambda: errors.EntryNotFoundError("no config.json\nat all"), "no config.json"),
    ],
)
def test_what_fails_is_one_line_that_says_how_to_go_on(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, error: Callable[[], Exception], message: str
) -> None:
    """The error has the setting, the name and what was tried."""

    def fail(*_: Any, **__: Any) -> str:
        raise error()

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", fail)
    with pytest.raises(SettingsError) as refusal:
        with_models(load_settings({}, policy_model="Me/own", revision="v2"))
    assert str(refusal.value).startswith("HEDGEROW_POLICY_MODEL = 'Me/own': ")
    assert message in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_folder_is_whole_with_all_parts_of_its_weights(tmp_path: Path) -> None:
    """The index names the parts."""
    assert not is_whole(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    assert not is_whole(tmp_path)
    parts = {"a": "one.safetensors", "b": "two.safetensors"}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": parts}))
    (tmp_path / "one.safetensors").touch()
    assert not is_whole(tmp_path)
    (tmp_path / "two.safetensors").touch()
    assert is_whole(tmp_path)


def test_a_bundled_models_files_are_made_at_a_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before that the model is known only by its name, as any other; it keeps that name."""
    twig = BundledModel(lambda: tmp_path, profile="qwen")
    for place in ("bundled", "setting_types", "model_settings", "model_download"):
        module = f"models.{place}" if place == "bundled" else f"server.{place}"
        monkeypatch.setattr(f"{module}.BUNDLED_MODELS", BUNDLED_MODELS | {"twig": twig})
    before = load_settings({}, policy_model="twig")
    assert (before.policy_model, before.model, before.engine) == (Path("twig"), "twig", "embedded")
    assert (before.reward_model, before.reward_format) == (None, "none")
    ready = with_models(before)
    assert (ready.policy_model, ready.model, ready.profile) == (tmp_path, "twig", "qwen")
    assert ready.engine == "embedded"


def test_what_was_not_set_is_said_in_one_line(tmp_path: Path) -> None:
    """The line has the option that sets each value; for the bundled models there is no line."""
    assert what_follows(load_settings({})) is None
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    line = what_follows(load_settings({}, policy_model=str(tmp_path), engine="embedded"))
    assert line is not None
    assert "Qwen2ForCausalLM, context 512" in line
    assert "--profile chat (not in docs/models.md: any chat model's)" in line
    assert "--reward-model none" in line
    assert "--engine" not in line
    assert "\n" not in line
