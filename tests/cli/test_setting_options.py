"""Settings on the command line and in the documents follow from their declaration."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from cli.main import app
from server.settings import ModelSettings, Settings, variable

DOCS = Path(__file__).parents[2] / "docs" / "settings.md"


def test_the_documents_table_is_the_declaration() -> None:
    """``hedgerow config table`` ends the page."""
    done = CliRunner().invoke(app, ["config", "table"])
    assert done.exit_code == 0, done.output
    assert DOCS.read_text().endswith(done.stdout)
    assert all(f"`{variable(name)}`" in done.stdout for name in Settings.model_fields)


def test_the_documents_models_are_the_catalog() -> None:
    """``hedgerow config models`` ends the page."""
    done = CliRunner().invoke(app, ["config", "models"])
    assert done.exit_code == 0, done.output
    assert DOCS.with_name("models.md").read_text().endswith(done.stdout)


@pytest.mark.parametrize("name", ["solve", "eval", "replay", "calibrate", "plan", "serve"])
def test_a_command_that_starts_an_engine_takes_its_settings(name: str) -> None:
    """Choices, switches and descriptions are the fields'; secrets are no options."""
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(app, [name, "--help"]).stdout
    for words in (
        "--kv-policy",
        "full|lru|arborkv",
        "--exact",
        "on|off",
        "--policy-url",
        "--launch",
    ):
        assert words in shown
    assert (str(ModelSettings.model_fields["kv_tokens"].description))[1:] in shown
    assert ("--max-running" in shown) == (name == "serve")
    assert "--embeddings-key" not in shown
    assert "--admin-key" not in shown


def test_what_is_not_given_is_the_environments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists, switches and all: an option that is left out sets nothing, not even to nothing."""
    given: list[dict[str, object]] = []
    monkeypatch.setattr("cli.arguments.load_settings", lambda **settings: given.append(settings))
    CliRunner().invoke(
        app, ["serve", "--port", "0", "--exact", "off", "--reward-url", "http://a:1"]
    )
    assert given == [{"port": "0", "exact": "off", "reward_urls": ["http://a:1"]}]
