"""Models that think before they reply: the thought stands in ``<think>`` and ``</think>``."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.completion import held_back

OPENS = "<think>"
CLOSES = "</think>"


def split(text: str, *, begun: bool = False, whole: bool = True) -> tuple[str, str]:
    """A text's thought and its reply, without the tags and the space beside them.

    ``begun``: the prompt has opened the thought. ``whole`` False: more of the text may come, and
    what it might still make part of a tag is left out; each part of a longer text then begins with
    that of a shorter one. A thought that is never closed has no reply.
    """
    inside = text
    if not begun:
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


def has_begun(prompt: Sequence[int], encode: Callable[[str], list[int]]) -> bool:
    """Whether a prompt ends with an open thought, as some chat templates do."""
    for end in (OPENS, OPENS + "\n"):
        tag = encode(end)
        if tag and list(prompt[-len(tag) :]) == tag:
            return True
    return False


class Saying:
    """One choice of a stream: what has been sent of its thought and of its reply."""

    def __init__(self, begun: bool | None) -> None:
        """``begun`` None: nothing is a thought here."""
        self._begun = begun
        self._text = ""
        self._thought = 0
        self._reply = 0

    def more(self, text: str) -> tuple[str, str]:
        """The parts of the thought and of the reply that are new with ``text``."""
        self._text += text
        return self._new(self._text, whole=False)

    def rest(self, text: str) -> tuple[str, str]:
        """The parts not sent yet, now that the whole ``text`` is known."""
        assert text.startswith(self._text), "what was sent as certain has changed"
        return self._new(text, whole=True)

    def _new(self, text: str, *, whole: bool) -> tuple[str, str]:
        if self._begun is None:
            thought, reply = "", text
        else:
            thought, reply = split(text, begun=self._begun, whole=whole)
        new = thought[self._thought :], reply[self._reply :]
        self._thought, self._reply = len(thought), len(reply)
        return new
