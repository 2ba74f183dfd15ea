"""``POST /v1/score`` on real SGLang servers of the bundled models, in float32 on the CPU."""

from __future__ import annotations

from typing import Any

import httpx2
import pytest

from models.bundled import SPRIG_FOLDER
from runtime.embedded.embedded_engine import EmbeddedEngine
from runtime.embedded.options import EngineOptions
from runtime.text import Text
from search.engine import Engine
from server.app import create_app
from server.service import create_service
from server.settings import Settings
from tests.closing import closing
from tests.runtime.sglang.support import SharedServers

pytestmark = [
    pytest.mark.slow,
    pytest.mark.sglang,
    pytest.mark.nightly,
    pytest.mark.timeout(1800),
    pytest.mark.asyncio(loop_scope="session"),
]

POLICY, PRM = SPRIG_FOLDER / "policy", SPRIG_FOLDER / "prm"
QUESTIONS = ("Use 4 5 10 13 to make 24.", "Use 4 9 10 13 to make 24.")
REPLIES = (
    ["13 * 4 = 52 (left: 5 10 52)", "10 * 5 = 50 (left: 50 52)", "50 - 52 = 24 (left: 24)"],
    ["13 + 5 = 18 (left: 4 10 18)", "18 + 10 = 28 (left: 4 28)", "28 - 4 = 24 (left: 24)"],
    ["5 + 5 = 10"],
)
ITEMS = [{"question": question, "steps": steps} for question in QUESTIONS for steps in REPLIES]


async def scores(engine: Engine, body: dict[str, Any]) -> list[list[float]]:
    """The rewards of each reply, by ``POST /v1/score`` of an app over ``engine``."""
    app = create_app(create_service(Settings(), engine, Text(POLICY)))
    transport = httpx2.ASGITransport(app=app)
    async with httpx2.AsyncClient(transport=transport, base_url="http://h", timeout=600) as client:
        reply = (await client.post("/v1/score", json=body)).raise_for_status().json()
    return [row["rewards"] for row in reply["data"]]


async def test_rewards_are_the_embedded_engines(yard: SharedServers) -> None:
    """Rewards agree to 1e-3 with the embedded engine's, and one by one with all at once."""
    await yard.have("policy", "reward")
    engine = (await yard.launched()).engine
    many = await scores(engine, {"items": ITEMS})
    singly = [(await scores(engine, item))[0] for item in ITEMS]
    async with closing(
        await EmbeddedEngine.start(EngineOptions(POLICY, PRM, "math-shepherd"))
    ) as embedded:
        expected = await scores(embedded, {"items": ITEMS})
    for ours, alone, theirs in zip(many, singly, expected, strict=True):
        assert ours == pytest.approx(alone, abs=1e-3)
        assert ours == pytest.approx(theirs, abs=1e-3)
    assert len({reward for row in many for reward in row}) > len(ITEMS)
