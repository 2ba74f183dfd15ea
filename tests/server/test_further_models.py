"""Several models in one server: each has its own engine, and they share all else."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from pathlib import Path

import httpx2
import pytest

from models.bundled import SPRIG_FOLDER
from server.app import create_app
from server.assemble import further_models
from server.service import add_model, create_service
from server.settings import Settings, SettingsError
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText, client_over, question

CHAT = "/v1/chat/completions"


@pytest.fixture
def oak() -> ScriptedEngine:
    """The second model's engine, which gives another reply."""
    return ScriptedEngine(lambda _: "I am the oak. The answer is 7.")


@pytest.fixture
async def two(engine: ScriptedEngine, oak: ScriptedEngine) -> AsyncIterator[httpx2.AsyncClient]:
    """A client of a server with the models sprig and oak."""
    service = create_service(Settings(), engine, PlainText())
    add_model(service, Settings(model="oak", step_tokens=64), oak, PlainText())
    async with client_over(create_app(service)) as client:
        yield client


async def test_the_models_name_picks_the_engine(
    two: httpx2.AsyncClient, engine: ScriptedEngine, oak: ScriptedEngine
) -> None:
    """It does so for chats, aliases, texts, searches and branches; both models are listed."""
    body = {"model": "oak", "messages": question(), "seed": 1}
    for path, change in (
        (CHAT, {}),
        (CHAT, {"model": "oak:rebase-4"}),
        ("/v1/completions", {"prompt": "?"}),
    ):
        answer = (await two.post(path, json=body | change)).json()
        assert "I am the oak" in str(answer["choices"][0])
        assert "/oak/" in answer["system_fingerprint"]
    document = (await two.post("/v1/search", json={"model": "oak", "question": "?"})).json()
    assert document["answer"] == "7"
    calls = len(oak.expanded)
    branch = await two.post(f"/v1/search/{document['id']}/branch", json={"node": 0})
    assert branch.json()["model"] == "oak"
    assert len(oak.expanded) > calls
    assert not engine.expanded
    ids = {model["id"] for model in (await two.get("/v1/models")).json()["data"]}
    assert {"sprig", "sprig:beam-4", "oak", "oak:beam-4"} <= ids
    assert (await two.get("/v1/models/oak:mcts-4")).status_code == 200
    assert (await two.post(CHAT, json=body | {"model": "elm"})).status_code == 404


async def test_one_engine_that_is_down_makes_the_server_unready(
    two: httpx2.AsyncClient, oak: ScriptedEngine
) -> None:
    """Readiness is a 503 although the other model still answers."""
    oak.down = True
    assert (await two.get("/ready")).status_code == 503
    body = {"model": "sprig", "messages": question()}
    assert (await two.post(CHAT, json=body)).status_code == 200
    assert (await two.post(CHAT, json=body | {"model": "oak"})).status_code == 503


async def test_metrics_tell_the_engines_apart(
    two: httpx2.AsyncClient, engine: ScriptedEngine, oak: ScriptedEngine
) -> None:
    """Every engine's report has its model as label; one that is down hides no other, and its last
    report stays."""
    engine.live, oak.live = {"a"}, {"b", "c"}
    first = (await two.get("/metrics")).text
    oak.usage = oak.health  # type: ignore[method-assign]
    oak.down, engine.live = True, set()
    second = (await two.get("/metrics")).text
    for text, sprig, up in ((first, 1.0, 1.0), (second, 0.0, 0.0)):
        running = 'hedgerow_branches{served="%s",state="running"}'
        assert f"{running % 'sprig'} {sprig}" in text
        assert f"{running % 'oak'} 2.0" in text
        assert 'hedgerow_engine_up{served="sprig"} 1.0' in text
        assert f'hedgerow_engine_up{{served="oak"}} {up}' in text
        for model in ("sprig", "oak"):
            assert f'hedgerow_engine_restarts_total{{served="{model}"}} 0.0' in text
            assert re.search(
                rf'hedgerow_info{{engine="scripted",kernel="",model="{model}",.*}} 1.0', text
            )


def test_a_table_says_in_what_a_model_differs(tmp_path: Path) -> None:
    """Settings that the table leaves out are the server's own."""
    path = tmp_path / "models.toml"
    path.write_text(f'[draft]\npolicy_model = "{SPRIG_FOLDER / "draft"}"\nreward_model = "none"\n')
    (draft,) = further_models(Settings(models_file=path, kv_tokens=4096))
    assert (draft.model, draft.reward_model, draft.kv_tokens) == ("draft", None, 4096)
    assert draft.policy_model == SPRIG_FOLDER / "draft"
    assert further_models(Settings()) == []


def test_what_was_fitted_to_one_model_is_not_another_ones(tmp_path: Path) -> None:
    """A table with a policy model of its own has its own theta or none."""
    theta = Path("tests/kvpolicy/all_signals.json")
    path = tmp_path / "models.toml"
    path.write_text(
        f'[same]\nkv_tokens = 4096\n[other]\npolicy_model = "{SPRIG_FOLDER / "draft"}"\n'
        f'[own]\npolicy_model = "{SPRIG_FOLDER / "draft"}"\nkv_theta = "{theta}"\n'
    )
    tuned = tmp_path / "tuned.toml"
    tuned.write_text("")
    models = further_models(Settings(models_file=path, kv_theta=theta, tuned=tuned))
    assert [model.kv_theta for model in models] == [theta, None, theta]
    assert [model.tuned for model in models] == [tuned, None, None]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[sprig]", "HEDGEROW_MODEL's own name"),
        ("oak = 1", "[oak]: must be a table"),
        ("[oak]\nport = 1", "port: not a model's"),
        ('[oak]\npolicy_model = "/nowhere"', "policy_model = '/nowhere': there is no such folder"),
        ('["an oak"]', "model = 'an oak'"),
        ("[oak", "models.toml"),
    ],
)
def test_a_wrong_table_is_named(tmp_path: Path, text: str, words: str) -> None:
    """The error names the file, the table and the field."""
    path = tmp_path / "models.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as error:
        further_models(Settings(models_file=path))
    assert words in str(error.value)
