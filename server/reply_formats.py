"""How a reply looks: OpenAI's two formats, and the reasoning before it in ``<think>`` tags."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from server.plain_completion import held_back


class ReplyFormat:
    """``/v1/chat/completions``: how a choice looks, whole or as a chunk's piece."""

    prefix = "chatcmpl"
    kind = "chat.completion"
    chunk_kind = "chat.completion.chunk"

    def choice(self, index: int, thought: str, text: str, finish_reason: str) -> dict[str, Any]:
        """A whole choice; ``thought`` is empty where there is none."""
        message = {"role": "assistant", "content": text, "refusal": None}
        message |= {"reasoning_content": thought} if thought else {}
        return _choice(index, finish_reason) | {"message": message}

    def piece(
        self, index: int, text: str | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        """A chunk's choice; without ``text`` it says nothing."""
        delta = {} if text is None else {"content": text}
        return _choice(index, finish_reason) | {"delta": delta}

    def opening(self, index: int) -> dict[str, Any] | None:
        """The choice of a stream's first chunk: the role. None where there are no roles."""
        return _choice(index, None) | {"delta": {"role": "assistant", "content": ""}}

    def reasoning(self, text: str, index: int = 0) -> dict[str, Any] | None:
        """A piece of a thought or of what the search does, as ``reasoning_content``, which several
        clients show apart from the reply. None where there is no place for it."""
        return _choice(index, None) | {"delta": {"reasoning_content": text}}


class TextFormat(ReplyFormat):
    """``/v1/completions``: the text alone."""

    prefix = "cmpl"
    kind = chunk_kind = "text_completion"

    def choice(self, index: int, thought: str, text: str, finish_reason: str) -> dict[str, Any]:
        return _choice(index, finish_reason) | {"text": text}

    def piece(
        self, index: int, text: str | None = None, finish_reason: str | None = None
    ) -> dict[str, Any]:
        return _choice(index, finish_reason) | {"text": text or ""}

    def opening(self, index: int) -> None:
        return None

    def reasoning(self, text: str, index: int = 0) -> None:
        return None


CHAT = ReplyFormat()
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
