"""``hedgerow serve smollm2``: a real chat model behind OpenAI's API, in processes of its own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from openai import OpenAI

from loadtest.served import Served
from tests.runtime.pretrained import folder_or_skip

pytestmark = pytest.mark.slow

PARIS = [{"role": "user", "content": "What is the capital of France?"}]


@pytest.fixture(scope="module")
def client() -> Iterator[OpenAI]:
    """OpenAI's, on a server by that one command."""
    folder_or_skip()
    with (
        Served("smollm2") as served,
        OpenAI(base_url=f"{served.url}/v1", api_key="none") as made,
    ):
        yield made


def test_it_is_served_by_its_name(client: OpenAI) -> None:
    """And answers as a chat model does, ending by itself."""
    assert client.models.list().data[0].id == "smollm2"
    reply = client.chat.completions.create(
        model="smollm2", messages=PARIS, temperature=0.0, max_tokens=40
    )
    [choice] = reply.choices
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"


def test_stop_strings_after_several_turns(client: OpenAI) -> None:
    """A stop string ends a reply and isn't in it; what was said before has been read."""
    turns = [
        {"role": "user", "content": "My name is Ada. What is my name?"},
        {"role": "assistant", "content": "Your name is Ada."},
        {"role": "user", "content": "Thank you! Say it again."},
    ]
    asked = {"model": "smollm2", "temperature": 0.0, "max_tokens": 24}
    reply = client.chat.completions.create(messages=turns, **asked)
    whole = reply.choices[0].message.content or ""
    word = whole.split()[2]
    cut = client.chat.completions.create(messages=turns, stop=[word], **asked)
    assert cut.choices[0].message.content == whole.partition(word)[0]
    assert cut.choices[0].finish_reason == "stop"
    short = client.chat.completions.create(messages=turns[:1], **asked)
    assert reply.usage is not None
    assert short.usage is not None
    assert reply.usage.prompt_tokens > short.usage.prompt_tokens


def test_a_stream_joins_to_the_reply(client: OpenAI) -> None:
    """Letters of several tokens come whole."""
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": "Repeat: Grüße 🌳 漢字"}],
        "temperature": 0.0,
        "max_tokens": 20,
    }
    whole = client.chat.completions.create(**asked).choices[0].message.content
    pieces = client.chat.completions.create(stream=True, **asked)
    parts = [c.choices[0].delta.content or "" for c in pieces if c.choices]
    assert "".join(parts) == whole
    assert len(parts) > 3


def test_searches_by_its_own_probabilities(client: OpenAI) -> None:
    """Without a reward model; the same seed grows the same tree."""
    search = {"policy": "rebase", "width": 3, "seed": 5, "step_tokens": 8, "trajectory_tokens": 24}
    grown = [
        client.chat.completions.create(
            model="smollm2", messages=PARIS, extra_body={"search": search}
        ).model_extra
        for _ in range(2)
    ]
    first, again = ((extra or {})["search"] for extra in grown)
    assert first["tree_digest"] == again["tree_digest"]
