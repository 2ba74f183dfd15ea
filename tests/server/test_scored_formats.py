"""``POST /v1/score`` by every reward format on tiny random models, against transformers."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.text import Text
from server.app import create_app
from server.service import create_service
from server.settings import Settings
from tests.closing import closing
from tests.runtime import outcome_model
from tests.runtime.test_reward_models import CASES, QUESTION, STEPS
from tests.runtime.tiny_models import make_checkpoint
from tests.server.conftest import client_over

SCORE = "/v1/score"
WITHIN = 1e-4
"""Rewards are rounded to this; half of it is rounding."""


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The policy beside all reward models."""
    return make_checkpoint(tmp_path_factory.mktemp("policy"))


@asynccontextmanager
async def serving(policy: Path, prm: Path | None, form: str) -> AsyncIterator[httpx2.AsyncClient]:
    """Yield a client of a server over an embedded engine with this reward model."""
    model = None if prm is None else str(prm)
    options = EngineOptions(
        str(policy), model, form, prm_kv_tokens=2000, batch_limit=8, threads=1, strict=True
    )
    async with closing(await EmbeddedEngine.start(options)) as engine:
        service = create_service(Settings(profile="chat"), engine, Text(policy))  # type: ignore[arg-type]
        async with client_over(create_app(service)) as client:
            yield client
            usage = await engine.usage()
            assert usage.prm_kv_tokens_active == usage.kv_tokens_active == 0


async def rewards(client: httpx2.AsyncClient, body: dict[str, Any]) -> list[list[float | None]]:
    """Return each reply's rewards."""
    response = (await client.post(SCORE, json=body)).raise_for_status().json()
    return [row["rewards"] for row in response["data"]]


@pytest.mark.slow
@pytest.mark.promise(
    "`/v1/score` gives a client's steps the rewards of transformers, by every format, alone or "
    "beside other work."
)
@pytest.mark.parametrize("form", CASES)
async def test_rewards_are_those_of_transformers(form: str, policy: Path, tmp_path: Path) -> None:
    """A reply's three steps, by question or by messages, alone or beside others, in vLLM's spelling
    and while a search grows: the same numbers."""
    prm = CASES[form].make(tmp_path)
    expected = CASES[form].expected(prm)
    body = {"question": QUESTION, "steps": STEPS}
    message = {"role": "user", "content": QUESTION}
    items = [body, {"messages": [message], "steps": STEPS[:2]}, body | {"question": "And 4?"}]
    pairs = {"text_1": QUESTION, "text_2": ["".join(STEPS), STEPS[0]]}
    async with serving(policy, prm, form) as client:
        assert await rewards(client, body) == [pytest.approx(expected, abs=WITHIN)]
        search = {"policy": "beam", "width": 4, "max_depth": 3, "max_step_tokens": 12, "seed": 1}
        answer, rewards_by_reply = await asyncio.gather(
            client.post("/v1/search", json={"question": QUESTION, "search": search}),
            rewards(client, {"items": items}),
        )
        pair_rewards = await rewards(client, pairs)
    assert answer.status_code == 200
    assert rewards_by_reply[:2] == [
        pytest.approx(expected, abs=WITHIN),
        pytest.approx(expected[:2], abs=WITHIN),
    ]
    assert rewards_by_reply[2] != rewards_by_reply[0]
    assert pair_rewards == [rewards_by_reply[0], rewards_by_reply[0][:1]]


@pytest.mark.slow
async def test_an_outcome_models_too(policy: Path, tmp_path: Path) -> None:
    """Only each whole reply has a reward."""
    prm = outcome_model.make_outcome_model(tmp_path)
    replies = [t.texts for t in outcome_model.trajectories()]
    items = [{"question": outcome_model.QUESTION, "steps": steps} for steps in replies]
    async with serving(policy, prm, outcome_model.FORMAT) as client:
        rewards_by_reply = await rewards(client, {"items": items})
    expected = outcome_model.expected_rewards(prm)
    assert [of_reply[-1] for of_reply in rewards_by_reply] == pytest.approx(expected, abs=WITHIN)
    assert all(reward is None for of_reply in rewards_by_reply for reward in of_reply[:-1])


@pytest.mark.slow
async def test_a_judges_verdicts_repeat_by_their_seed(policy: Path, tmp_path: Path) -> None:
    """They repeat alone or beside others; another seed draws other verdicts."""
    file = tmp_path / "digit.json"
    file.write_text(
        json.dumps(
            {"extends": "generative", "pattern": r"(\d)", "lowest": 0, "verdict_tokens": 40}
            | {"template": "{question} {steps}", "votes": 4}
        )
    )
    body = {"question": QUESTION, "steps": STEPS}
    other_body = {"question": "And 4?", "steps": STEPS}
    async with serving(policy, None, str(file)) as client:
        alone = await rewards(client, body | {"seed": 7})
        company = await rewards(client, {"items": [other_body, body], "seed": 7})
        reseeded = await rewards(client, body | {"seed": 8})
    assert company[1] == alone[0]
    assert len({*alone[0], *reseeded[0]}) > 1
    assert alone != reseeded


async def test_log_probabilities_are_no_reward_model(policy: Path) -> None:
    """The format ``none`` can score only what the policy has drawn, not a client's steps."""
    async with serving(policy, None, "none") as client:
        answer = await client.post(SCORE, json={"question": QUESTION, "steps": STEPS})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "no_reward_model")
