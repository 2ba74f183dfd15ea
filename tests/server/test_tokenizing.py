"""Long texts do not delay short ones; a text that cannot fit is refused without tokenising."""

from __future__ import annotations

import asyncio
import gc
import threading

import pytest

from search.engine import PrefixTooLong
from server.app import create_app
from server.service import LONG, Tokenizing, create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText, client_over, question, refusal


class Copied(PlainText):
    """A tokenizer that counts its users at once, with a list of all copies."""

    def __init__(self, copies: list[Copied]) -> None:
        self.users = self.peak_users = 0
        self.copies = copies
        copies.append(self)

    def another(self) -> Copied:
        """Return a copy."""
        return Copied(self.copies)


async def test_short_texts_pass_long_ones() -> None:
    """Four long texts queue, one of them at work; a short one is done meanwhile. Each tokenizer has
    one user at a time."""
    continuation, go_on = threading.Event(), threading.Event()
    copies: list[Copied] = []
    text, tokenizing = Copied(copies), Tokenizing()

    def encode(copy: PlainText, *, slow: bool) -> list[int]:
        assert isinstance(copy, Copied)
        copy.users += 1
        copy.peak_users = max(copy.peak_users, copy.users)
        if slow:
            continuation.set()
            go_on.wait(60)
        copy.users -= 1
        return [id(copy)]

    long = [
        asyncio.create_task(tokenizing.run(text, LONG, lambda copy: encode(copy, slow=True)))
        for _ in range(4)
    ]
    await asyncio.to_thread(continuation.wait)
    assert await tokenizing.run(text, LONG - 1, lambda copy: encode(copy, slow=False)) == [id(text)]
    assert not any(task.done() for task in long)
    go_on.set()
    ids = await asyncio.gather(*long)
    assert len(copies) == 2
    assert ids == [[id(copies[1])]] * 4
    assert [copy.peak_users for copy in copies] == [1, 1]


async def test_an_error_that_nobody_waits_for_is_not_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The caller has left by the time the text turns out to be too long."""
    continuation, go_on = threading.Event(), threading.Event()

    def encode(tokenizer: object) -> list[int]:
        continuation.set()
        go_on.wait(60)
        raise PrefixTooLong("too long")

    task = asyncio.create_task(Tokenizing().run(PlainText(), 1, encode))
    await asyncio.to_thread(continuation.wait)
    task.cancel()
    await asyncio.sleep(0)
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    del task
    gc.collect()
    await asyncio.sleep(0)
    assert [r.getMessage() for r in caplog.records if r.name == "asyncio"] == []


class Small(PlainText):
    """A tokenizer of a model with a small context."""

    def encode_chat(self, messages: object) -> list[int]:
        """Refuse any text as too long."""
        raise PrefixTooLong("9 bytes; 8 are more than the 2 tokens can stand for")

    def encode_prompt(self, text: str) -> list[int]:
        """Refuse any text as too long."""
        return self.encode_chat(text)


async def test_what_cannot_fit_is_refused_by_name() -> None:
    """With the same error as a prompt that was tokenised and is too long."""
    app = create_app(create_service(Settings(), ScriptedEngine(), Small()))
    async with client_over(app) as http:
        for path, field, body in (
            ("/v1/chat/completions", "messages", {"messages": question()}),
            ("/v1/completions", "prompt", {"prompt": "a"}),
            ("/v1/search", "question", {"question": "a"}),
            ("/v1/score", "question", {"question": "a", "steps": ["b"]}),
        ):
            error = await refusal(http, path, {"model": "sprig"} | body)
            assert error["code"] == "context_length_exceeded"
            assert error["param"] == field
            assert "maximum context length" in error["message"]
