"""Command-line options and documents of settings follow from the settings' declaration."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from server.setting_types import allowed_values
from server.settings import ModelSettings, Settings, variable

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_documents_table_is_the_declaration() -> None:
    """docs/settings.md ends with the output of ``hedgerow config table``."""
    invocation = CliRunner().invoke(app, ["config", "table"])
    assert invocation.exit_code == 0, invocation.output
    assert DOCS.read_text().endswith(invocation.stdout)
    assert all(f"`{variable(name)}`" in invocation.stdout for name in Settings.model_fields)


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("kv_policy", "full, lru, arborkv"),
        ("draft_tokens", "≥ 0, ≤ 15"),
        ("key_queued", "≥ 0"),
        ("head_seconds", "> 0"),
        ("exact", "on, off"),
        ("encoder", ""),
    ],
)
def test_allowed_values_come_from_the_field(name: str, values: str) -> None:
    """Names of a choice, bounds of a number, optional or not; nothing for other settings."""
    assert allowed_values(Settings.model_fields[name]) == values


def test_the_documents_models_are_the_catalog() -> None:
    """docs/models.md ends with the output of ``hedgerow config models``."""
    invocation = CliRunner().invoke(app, ["config", "models"])
    assert invocation.exit_code == 0, invocation.output
    assert DOCS.with_name("models.md").read_text().endswith(invocation.stdout)


@pytest.mark.parametrize("name", ["solve", "eval", "replay", "calibrate", "plan", "serve"])
def test_a_command_that_starts_an_engine_takes_its_settings(name: str) -> None:
    """Choices, switches and help come from the fields; secrets are no options."""
    help_text = CliRunner(env={"COLUMNS": "300"}).invoke(app, [name, "--help"]).stdout
    for words in (
        "--kv-policy",
        "full|lru|arborkv",
        "--exact",
        "on|off",
        "--policy-url",
        "--launch",
    ):
        assert words in help_text
    assert (str(ModelSettings.model_fields["kv_tokens"].description))[1:] in help_text
    assert ("--max-running" in help_text) == (name == "serve")
    assert "--embeddings-key" not in help_text
    assert "--admin-key" not in help_text


def test_what_is_not_given_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """An option that is left out sets nothing, not even an empty list or ``off``."""
    calls: list[dict[str, object]] = []
    monkeypatch.setattr("cli.arguments.load_settings", lambda **settings: calls.append(settings))
    CliRunner().invoke(
        app, ["serve", "--port", "0", "--exact", "off", "--reward-url", "http://a:1"]
    )
    assert calls == [{"port": "0", "exact": "off", "reward_urls": ["http://a:1"]}]
