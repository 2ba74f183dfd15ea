"""Paths that are spelt by the reward model's own tokenizer, from questions and steps as texts.

A step's ids follow from the step alone, so a path only ever grows at its end and scoring a step
costs a prefill of that step. Words in questions and steps that look like control tokens are encoded
as text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from runtime.reward_format import Ids, RewardFormat, Spelt, fill_template
from runtime.text import Text
from search.engine import Trajectory

_OPENING, _FIRST, _LATER = "opening", "first", "later"
_PROBE = ("What is 1 + 1?", ("1 + 1 = 2.\n\n", "The answer is 2."))


@dataclass(frozen=True, slots=True)
class OwnIds:
    """An opening, then each step's text, tokenised alone by the reward model's tokenizer.

    A step's text is stripped of white space, and of the tag if it ends with the tag's text.
    """

    form: RewardFormat
    text: Text
    tag: int | None

    def opening(self, prompt: Sequence[int], question: str, spelt: Spelt) -> Ids:
        """The ids of the format's opening with the question in it."""
        if (_OPENING, question) not in spelt:
            spelt[_OPENING, question] = self._spell_opening(question)
        return spelt[_OPENING, question]

    def path(
        self, prompt: Sequence[int], question: str, trajectory: Trajectory, spelt: Spelt
    ) -> Ids:
        """The ids of opening, step, tag, step, tag, and so on."""
        path = list(self.opening(prompt, question, spelt))
        for place, words in enumerate(trajectory.texts):
            key = (_LATER if place else _FIRST), words
            if key not in spelt:
                spelt[key] = self._spell(words, self.form.later if place else self.form.first)
            path += spelt[key]
        return tuple(path)

    def _spell_opening(self, question: str) -> Ids:
        if self.form.system is None:
            begin = self.text.bos if self.form.opening.startswith("{bos}") else None
            words = self.text.encode(_fill_opening(self.form.opening, self.text.plain(question)))
            return tuple(words) if begin is None else (begin, *words)
        system = {"role": "system", "content": self.form.system}
        user = {"role": "user", "content": self.text.plain(question)}
        return tuple(self.text.encode(self.text.render_chat([system, user])))

    def _spell(self, words: str, before: str) -> Ids:
        bare = words.strip()
        if self.form.tag.strip():
            bare = bare.removesuffix(self.form.tag.strip()).rstrip()
        ids = self.text.encode_after(before + self.text.plain(bare))
        return tuple(ids) if self.tag is None else (*ids, self.tag)


@dataclass(frozen=True, slots=True)
class Dialogue:
    """Each step is a user's turn; the reward model is read where it would answer ``good`` or
    ``bad``, and every earlier turn was answered by ``good``.

    A piece, tokenised alone, runs from the answer to the previous turn up to the point where the
    assistant would answer its own turn.
    """

    form: RewardFormat
    text: Text
    good: str

    @classmethod
    def of(cls, form: RewardFormat, text: Text) -> Dialogue:
        """Raises ValueError if the model's chat template cannot be cut into such pieces."""
        dialogue = cls(form, text, str(form.good))
        dialogue._must_cut()
        return dialogue

    def opening(self, prompt: Sequence[int], question: str, spelt: Spelt) -> Ids:
        """Empty: the question is part of the first turn."""
        return ()

    def path(
        self, prompt: Sequence[int], question: str, trajectory: Trajectory, spelt: Spelt
    ) -> Ids:
        """The ids of turn, good, turn, good, ..., turn."""
        path: list[int] = []
        for place, words in enumerate(trajectory.texts):
            key = (_LATER if place else _FIRST), words
            if key not in spelt:
                piece = self._later(words) if place else self._first(question, words)
                spelt[key] = tuple(self.text.encode_after(piece))
            path += spelt[key]
        return tuple(path)

    def _first(self, question: str, words: str) -> str:
        opening = _fill_opening(self.form.opening, self.text.plain(question))
        content = opening + self.text.plain(words.strip())
        return self.text.render_chat([{"role": "user", "content": content}])

    def _later(self, words: str) -> str:
        """The text that an answer and a new turn add to a conversation of one turn."""
        before = [{"role": "user", "content": "?"}]
        answer = {"role": "assistant", "content": self.good}
        after = [*before, answer, {"role": "user", "content": self.text.plain(words.strip())}]
        return self.text.render_chat(after)[len(self.text.render_chat(before)) :]

    def _must_cut(self) -> None:
        question, steps = _PROBE
        contents = [_fill_opening(self.form.opening, question) + steps[0].strip(), steps[1]]
        answer = {"role": "assistant", "content": self.good}
        turns = [{"role": "user", "content": content} for content in contents]
        whole = self.text.render_chat([turns[0], answer, turns[1]])
        pieces = [self._first(question, steps[0]), self._later(steps[1])]
        ids = [token for piece in pieces for token in self.text.encode_after(piece)]
        answer_first = pieces[1].lstrip().startswith(self.good)
        if ids != self.text.encode_after(whole) or not answer_first:
            raise ValueError(
                f"reward_format {self.form.name!r}: the chat template of {self.text.checkpoint} "
                f"does not put {self.good!r} right after the assistant's opening, turn by turn"
            )


def _fill_opening(template: str, question: str) -> str:
    """The template with the question filled in and without its begin token."""
    return fill_template(template.removeprefix("{bos}"), {"question": question})
