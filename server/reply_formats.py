"""How a reply looks: OpenAI's two formats, and the reasoning before it in ``<think>`` tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from server.plain_completion import held_back


class ReplyFormat(Protocol):
    """How a choice looks, whole or as a chunk's piece."""

    prefix: str
    kind: str
    chunk_kind: str

    def choice(self, index: int, thought: str, text: str, finish_reason: str) -> dict[str, Any]:
        """A whole choice; ``thought`` is empty where there is none."""
        ...

    def piece(
        self, index: int, text: str | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        """A chunk's choice; without ``text`` it says nothing."""
        ...

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk, if it has one of its own."""
        ...

    def reasoning(self, text: str, index: int = 0) -> dict[str, Any] | None:
        """A piece of a thought or of what the search does, where the shape has a place for it."""
        ...


class ChatFormat:
    """``/v1/chat/completions``."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, thought: str, text: str, finish_reason: str) -> dict[str, Any]:
        """A message."""
        message = {"role": "assistant", "content": text, "refusal": None}
        message |= {"reasoning_content": thought} if thought else {}
        return _choice(index, finish_reason) | {"message": message}

    def piece(
        self, index: int, text: str | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        """A delta, empty if there is nothing to say."""
        delta = {} if text is None else {"content": text}
        return _choice(index, finish_reason) | {"delta": delta}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The role."""
        return _choice(index, None) | {"delta": {"role": "assistant", "content": ""}}

    def reasoning(self, text: str, index: int = 0) -> dict[str, Any] | None:
        """``reasoning_content``, which several clients show apart from the reply."""
        return _choice(index, None) | {"delta": {"reasoning_content": text}}


class TextFormat:
    """``/v1/completions``."""

    prefix = "cmpl"
    kind = "text_completion"
    chunk_kind = "text_completion"

    def choice(self, index: int, thought: str, text: str, finish_reason: str) -> dict[str, Any]:
        """The text alone."""
        return _choice(index, finish_reason) | {"text": text}

    def piece(
        self, index: int, text: str | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        """The text alone, empty if there is nothing to say."""
        return _choice(index, finish_reason) | {"text": text or ""}

    def opening(self, index: int) -> dict[str, Any] | None:
        """None: there are no roles."""
        return None

    def reasoning(self, text: str, index: int = 0) -> dict[str, Any] | None:
        """None: there is no place for it."""
        return None


CHAT = ChatFormat()
TEXT = TextFormat()


def _choice(index: int, finish_reason: str | None) -> dict[str, Any]:
    return {"index": index, "logprobs": None, "finish_reason": finish_reason}


OPENS = "<think>"
CLOSES = "</think>"


def split_reasoning(text: str, *, opened: bool = False, whole: bool = True) -> tuple[str, str]:
    """A text's thought and its reply, without the tags and the space beside them.

    ``opened``: the prompt has opened the thought. ``whole`` False: more of the text may come, and
    what it might still make part of a tag is left out; each part of a longer text then begins with
    that of a shorter one. A thought that is never closed has no reply.
    """
    inside = text
    if not opened:
        bare = text.lstrip()
        if not whole and len(bare) < len(OPENS) and OPENS.startswith(bare):
            return "", ""
        if not bare.startswith(OPENS):
            return "", text
        inside = bare.removeprefix(OPENS)
    thought, closed, reply = inside.partition(CLOSES)
    if not closed and not whole:
        thought = thought[: len(thought) - held_back(thought, (CLOSES,))]
    return thought.strip(), reply.lstrip()


def opens_reasoning(prompt: Sequence[int], encode: Callable[[str], list[int]]) -> bool:
    """Whether a prompt ends with an open thought, as some chat templates do."""
    for end in (OPENS, OPENS + "\n"):
        tag = encode(end)
        if tag and list(prompt[-len(tag) :]) == tag:
            return True
    return False
