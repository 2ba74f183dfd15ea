"""Settings: every key by name, and one clear line for a wrong one."""

from __future__ import annotations

from pathlib import Path
from types import NoneType
from typing import get_args

import pytest

import server.settings
from models.bundled import SPRIG_FOLDER
from server.setting_types import checkpoint
from server.settings import Settings, SettingsError, load_settings


def test_the_environment_is_read_and_the_command_line_wins() -> None:
    """An override of None leaves the environment's value."""
    environ = {"HEDGEROW_PORT": "9000", "HEDGEROW_EXACT": "off", "OTHER": "1"}
    settings = load_settings(environ, port=None, host="0.0.0.0")
    assert (settings.port, settings.exact, settings.host) == (9000, False, "0.0.0.0")
    assert load_settings(environ, port=1).port == 1
    assert load_settings({"HEDGEROW_REWARD_MODEL": "none"}).reward_model is None
    assert load_settings({"HEDGEROW_API_KEY": "a client's own"}) == Settings()
    assert load_settings({"HEDGEROW_CORS_ORIGINS": "a, b"}).cors_origins == ("a", "b")


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("reward_urls", "", ()),
        ("kv_load", "64,256,64", (64, 256, 64)),
        ("cors_origins", "https://a.org", ("https://a.org",)),
    ],
)
def test_lists_stand_by_commas_in_the_environment(
    name: str, text: str, expected: tuple[object, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Lists are split at commas, as the chart and the compose files write them."""
    monkeypatch.setenv(f"HEDGEROW_{name.upper()}", text)
    assert getattr(load_settings(), name) == expected
    monkeypatch.delenv(f"HEDGEROW_{name.upper()}")
    monkeypatch.setenv("HEDGEROW_ENGINE", "sglang")
    monkeypatch.setenv("HEDGEROW_POLICY_URLS", "http://a:1, http://b:2/")
    assert load_settings().policy_urls == ("http://a:1", "http://b:2")
    monkeypatch.delenv("HEDGEROW_POLICY_URLS")
    settings = load_settings(launch=True, launch_memory="0.5,0.4")
    assert settings.launch_memory == (0.5, 0.4)


def test_a_shipped_theta_goes_with_the_bundled_policy_model_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is used if it exists; ``none`` and another file override it."""
    monkeypatch.setattr(server.settings, "SPRIG_FOLDER", tmp_path)
    shipped, other, policy = tmp_path / "theta.json", tmp_path / "mine.json", tmp_path / "policy"
    policy.mkdir()
    fields = {"policy_model": policy, "reward_model": "none", "draft_model": "none"}
    assert Settings(**fields).kv_theta is None
    for path in (shipped, other):
        path.write_text("{}")
    assert Settings(**fields).kv_theta == shipped
    assert Settings(**fields | {"policy_model": tmp_path}).kv_theta is None
    texts = {name: str(value) for name, value in fields.items()}
    assert load_settings({"HEDGEROW_KV_THETA": "none"}, **texts).kv_theta is None
    assert load_settings({"HEDGEROW_KV_THETA": ""}, **texts).kv_theta is None
    assert load_settings({"HEDGEROW_KV_THETA": str(other)}, **texts).kv_theta == other


def test_the_environment_is_read_by_load_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given environment and settings by name do not mix with the process's environment."""
    monkeypatch.setenv("HEDGEROW_PORT", "9000")
    assert load_settings().port == 9000
    assert load_settings({}).port == 8000
    assert Settings().port == 8000


OPTIONAL = [
    name for name, field in Settings.model_fields.items() if NoneType in get_args(field.annotation)
]


@pytest.mark.parametrize("name", OPTIONAL)
def test_none_means_no_value(name: str) -> None:
    """For every setting that may be without a value."""
    assert getattr(Settings.model_validate({name: "none"}), name) is None


def test_the_default_listens_on_this_machine_only() -> None:
    """The server listens on 127.0.0.1 and port 8000 by default."""
    assert Settings().host == "127.0.0.1"
    assert Settings().port == 8000


@pytest.mark.parametrize(
    ("environ", "words"),
    [
        ({"HEDGEROW_PORT": "eighty"}, ["HEDGEROW_PORT = 'eighty'", "integer"]),
        ({"HEDGEROW_PORT": "70000"}, ["HEDGEROW_PORT = '70000'", "65535"]),
        ({"HEDGEROW_KV_TOKENS": "-1"}, ["HEDGEROW_KV_TOKENS", "greater than or equal to 64"]),
        ({"HEDGEROW_POLICY_MODEL": "/nowhere"}, ["HEDGEROW_POLICY_MODEL", "no such folder"]),
        ({"HEDGEROW_KV_THETA": "/nowhere"}, ["HEDGEROW_KV_THETA = '/nowhere'", "no such file"]),
        ({"HEDGEROW_ENGINE": "steam"}, ["HEDGEROW_ENGINE = 'steam'", "'embedded'"]),
        ({"HEDGEROW_BATCHLIMIT": "3"}, ["HEDGEROW_BATCHLIMIT", "HEDGEROW_BATCH_LIMIT"]),
        ({"HEDGEROW_EMBEDDER": "oracle"}, ["HEDGEROW_EMBEDDER = 'oracle'", "'lexical'"]),
        ({"HEDGEROW_EMBEDDINGS_URL": "host"}, ["HEDGEROW_EMBEDDINGS_URL = 'host'", "http://"]),
        ({"HEDGEROW_KV_SPLIT": "half"}, ["HEDGEROW_KV_SPLIT = 'half'", "'even'"]),
        ({"HEDGEROW_BATCH_LIMIT": "0"}, ["HEDGEROW_BATCH_LIMIT = '0'", "or equal to 1"]),
        ({"HEDGEROW_THREADS": "-1"}, ["HEDGEROW_THREADS = '-1'", "or equal to 0"]),
        ({"HEDGEROW_X": "3"}, ["HEDGEROW_X: there is no such setting"]),
        ({"HEDGEROW_X": "3", "HEDGEROW_PROT": "1"}, ["HEDGEROW_X: ", "did you mean HEDGEROW_PORT"]),
        ({"HEDGEROW_SERVER_HEADERS": "secret"}, ["HEDGEROW_SERVER_HEADERS = '...'"]),
        ({"HEDGEROW_POLICY_KEY": "secret"}, ["HEDGEROW_POLICY_KEY = '...': not acted on"]),
        ({"HEDGEROW_POLICY_URLS": "http://me:secret@x"}, ["//...@x", "would be logged"]),
        ({"HEDGEROW_EMBEDDINGS_URL": "http://me:secret@x"}, ["//...@x", "would be logged"]),
        ({"HEDGEROW_OTLP_ENDPOINT": "http://me:secret@x"}, ["//...@x", "would be logged"]),
        ({"HEDGEROW_VERIFIER": "http://me:secret@x"}, ["//...@x", "would be logged"]),
        ({"HEDGEROW_KEY_QUEUED": "-1"}, ["HEDGEROW_KEY_QUEUED = '-1'", "or equal to 0"]),
    ],
)
def test_a_wrong_setting_names_key_value_and_what_is_allowed(
    environ: dict[str, str], words: list[str]
) -> None:
    """A misspelled key is an error too, and the nearest key is named."""
    with pytest.raises(SettingsError) as error:
        load_settings(environ)
    assert all(word in str(error.value) for word in words)
    assert "secret" not in str(error.value)


def test_a_checkpoint_is_a_bundled_name_a_folder_or_a_name_on_the_hub(tmp_path: Path) -> None:
    """Nothing is downloaded: a model that is not here yet stays a name."""
    assert checkpoint("sprig") == SPRIG_FOLDER / "policy"
    assert checkpoint(str(tmp_path)) == tmp_path
    assert checkpoint("no/such-model") == Path("no/such-model")
    with pytest.raises(ValueError, match="there is no such folder; bundled are sprig"):
        checkpoint(str(tmp_path / "x"))
