"""The path that an outcome model reads: the question, the whole reply, and what ends a reply."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.reward_format import Ids, RewardFormat, Spelt
from runtime.reward_texts import OwnIds
from runtime.text import Text
from search.engine import Trajectory


@dataclass(frozen=True, slots=True)
class WholeReply:
    """A finished reply as the kind of conversation its model was trained on, read at its end.

    The reply is tokenised as one text, so that two replies share only the question's ids.
    """

    form: RewardFormat
    text: Text

    def opening(self, prompt: Sequence[int], question: str, spelt: Spelt) -> Ids:
        """The ids of the format's opening with the question in it."""
        return OwnIds(self.form, self.text, None).opening(prompt, question, spelt)

    def path(
        self, prompt: Sequence[int], question: str, trajectory: Trajectory, spelt: Spelt
    ) -> Ids:
        """The ids of opening, reply and closing."""
        reply = self.text.plain("".join(trajectory.texts).strip())
        reply_ids = self.text.encode_after(reply + self.form.closing)
        return (*self.opening(prompt, question, spelt), *reply_ids)
