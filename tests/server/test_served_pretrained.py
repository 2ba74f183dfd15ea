"""``hedgerow serve smollm2``: a real chat model behind OpenAI's API, in processes of its own."""

from __future__ import annotations

import pytest
from openai import OpenAI

from loadtest.served import Served
from tests.runtime.pretrained import folder_or_skip


@pytest.mark.slow
def test_it_is_served_by_its_name() -> None:
    """The command needs no options; the reply is a chat model's and ends by itself."""
    folder_or_skip()
    with (
        Served("smollm2") as server,
        OpenAI(base_url=f"{server.url}/v1", api_key="none") as client,
    ):
        assert client.models.list().data[0].id == "smollm2"
        reply = client.chat.completions.create(
            model="smollm2",
            messages=[{"role": "user", "content": "What is the capital of France?"}],
            temperature=0.0,
            max_tokens=40,
        )
    [choice] = reply.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
