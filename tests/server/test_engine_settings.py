"""Settings by engine: a setting that an engine would not act on is refused by name."""

from __future__ import annotations

import pytest

from models.bundled import SPRIG_FOLDER
from server.setting_types import EMBEDDED, EVERY_WAY, LAUNCHED, OPENAI, RUNNING
from server.settings import PREFIX, Settings, SettingsError, declared, load_settings

ACTED_ON_BY = {
    name: declared(field)["on"]
    for name, field in Settings.model_fields.items()
    if declared(field)["on"] != EVERY_WAY
}
OFF = {
    name: off
    for name, field in Settings.model_fields.items()
    if (off := declared(field)["off"]) is not None
}
WAYS = {
    EMBEDDED: {"engine": "embedded"},
    LAUNCHED: {"engine": "sglang", "launch": "true"},
    RUNNING: {"engine": "sglang", "policy_urls": "http://a:1", "reward_urls": "http://b:1"},
    OPENAI: {"engine": "openai", "policy_urls": "http://a:1", "reward_urls": "http://b:1"},
}
VALUES = {
    "kv_tokens": "5000",
    "prm_kv_tokens": "5000",
    "kv_policy": "lru",
    "kv_theta": "tests/kvpolicy/all_signals.json",
    "kv_split": "even",
    "kv_load": "1,2,1",
    "batch_limit": "8",
    "draft": "serial",
    "draft_model": str(SPRIG_FOLDER / "draft"),
    "draft_tokens": "2",
    "k_config": "2,1",
    "draft_kv_tokens": "5000",
    "verify_batch": "2",
    "dedup": "true",
    "order": "fcfs",
    "threads": "1",
    "exact": "true",
    "kernel": "torch",
    "embedder_layer": "2",
    "models_file": "models.toml",
    "start_seconds": "30",
    "routing": "smg",
    "connect_seconds": "5",
    "answer_seconds": "60",
    "probe_seconds": "5",
    "recovery_seconds": "60",
    "launch": "true",
    "launch_device": "cpu",
    "launch_memory": "0.5,0.5",
    "policy_args": "--tp-size 2",
    "reward_args": "--tp-size 2",
    "policy_urls": "http://a:1",
    "reward_urls": "http://a:1",
    "policy_name": "a",
    "reward_name": "b",
    "policy_key": "k",
    "reward_key": "k",
    "server_headers": "X-Org: a, X-Team: b",
    "speculate": "true",
    "lookahead": "true",
}


def settings_for(way: str, name: str, value: object) -> Settings:
    """Return the settings of a way to run an engine, with one more setting."""
    fields = WAYS[way] | {name: str(value)}
    return load_settings({f"{PREFIX}{key.upper()}": text for key, text in fields.items()})


def test_the_table_names_settings() -> None:
    """The table has each of them, and each value that means off."""
    assert set(VALUES) == set(ACTED_ON_BY)
    assert set(OFF) <= set(ACTED_ON_BY)


@pytest.mark.parametrize("name", VALUES)
def test_an_engine_refuses_what_it_would_not_act_on(name: str) -> None:
    """The error names the setting, its value and the engines that act on it; others take it."""
    for way in set(WAYS) - {
        LAUNCHED if name.endswith("urls") else RUNNING if name == "launch" else ""
    }:
        if way in ACTED_ON_BY[name]:
            assert name in settings_for(way, name, VALUES[name]).model_fields_set
            continue
        with pytest.raises(SettingsError) as error:
            settings_for(way, name, VALUES[name])
        assert str(error.value).startswith(f"{PREFIX}{name.upper()} = ")
        assert f"not acted on by {way}" in str(error.value)
        assert str(error.value).endswith(" or ".join(ACTED_ON_BY[name]))


@pytest.mark.parametrize("name", OFF)
@pytest.mark.parametrize("way", WAYS)
def test_off_is_what_any_engine_may_be_told(way: str, name: str) -> None:
    """Off asks for nothing that an engine could ignore."""
    if not (name == "launch" and way == LAUNCHED):
        assert getattr(settings_for(way, name, OFF[name]), name) == OFF[name]


def test_urls_and_launched_servers_exclude_each_other() -> None:
    """``--launch`` with a URL is refused: servers that are launched have URLs of their own."""
    with pytest.raises(SettingsError, match=r"POLICY_URLS = .*not acted on by .* --launch; leave"):
        settings_for(LAUNCHED, "policy_urls", "http://a:1")
