"""What a profile adds to a search: a system message, if the request has none."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from runtime.profiles import PROFILES
from server.app import create_app
from server.prompts import under_profile
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText, client_over, question

SYSTEM = {"role": "system", "content": "Be brief."}


class Recording(PlainText):
    """Keeps the roles of every conversation that it encodes."""

    def __init__(self) -> None:
        self.conversations: list[tuple[str, ...]] = []

    def encode_chat(self, messages: Sequence[dict[str, str]]) -> list[int]:
        """Note the roles and encode."""
        self.conversations.append(tuple(message["role"] for message in messages))
        return super().encode_chat(messages)


@pytest.mark.parametrize(
    ("path", "fields", "profile", "roles"),
    [
        ("/v1/chat/completions", {"search": {"width": 2}}, "qwen", ("system", "user")),
        ("/v1/search", {"search": {"width": 2}}, "qwen", ("system", "user")),
        ("/v1/chat/completions", {}, "qwen", ("user",)),
        ("/v1/chat/completions", {"search": {"width": 2}}, "chat", ("user",)),
        ("/v1/chat/completions", {"search": {"width": 2}}, "sprig", ("user",)),
    ],
)
async def test_a_search_is_asked_to_work_in_steps(
    path: str, fields: dict[str, Any], profile: str, roles: tuple[str, ...]
) -> None:
    """A plain reply gets no system message, as on any other server of the model."""
    text = Recording()
    service = create_service(Settings(profile=profile), ScriptedEngine(), text)
    async with client_over(create_app(service)) as client:
        answer = await client.post(path, json={"model": "sprig", "messages": question()} | fields)
    assert answer.status_code == 200, answer.text
    assert roles in text.conversations
    assert ("system", "user") not in text.conversations or roles == ("system", "user")


def test_the_requests_own_system_message_stays_alone() -> None:
    """No profile adds one beside it."""
    messages = [SYSTEM, *question()]
    for profile in PROFILES.values():
        assert under_profile(messages, profile) == messages
    assert under_profile(question(), PROFILES["llama"])[0]["role"] == "system"
    assert under_profile(question(), PROFILES["sprig"]) == question()
