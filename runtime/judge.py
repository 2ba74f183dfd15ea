"""An LLM as judge: its prompt, the seeds of its votes, and the reward computed from its verdicts.

The value strategy of Tree of Thoughts as SEED's appendix D sets it: reasons first, then a number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from runtime.reward_format import RewardFormat, fill_template
from runtime.text import Text
from search.engine import Sampling, Trajectory
from search.tree import node_seed

STEP_BREAK = "\n\n"


class Judgement(NamedTuple):
    """A reward in [0, 1], and how many verdicts held no number."""

    reward: float
    unparsed: int


@dataclass(frozen=True, slots=True)
class Judge:
    """A ``judge`` format with the text settings of the model that judges."""

    form: RewardFormat
    text: Text

    @property
    def sampling(self) -> Sampling:
        """Sampling for a verdict, which is drawn to its end or to ``verdict_tokens``."""
        form = self.form
        return Sampling(form.temperature, stop=(), max_step_tokens=form.verdict_tokens)

    def prompt(self, question: str, trajectory: Trajectory) -> tuple[int, ...]:
        """The ids that the judge reads: the filled template as a user's message.

        Steps are stripped and joined by blank lines; those without text are left out.
        """
        steps = STEP_BREAK.join(words.strip() for words in trajectory.texts if words.strip())
        content = fill_template(self.form.template, {"question": question, "steps": steps})
        return tuple(self.text.encode_chat([{"role": "user", "content": content}]))

    def seeds(self, trajectory: Trajectory) -> tuple[int, ...]:
        """A noise seed for each vote."""
        return tuple(node_seed(trajectory.seed, "vote", (v,)) for v in range(self.form.votes))

    def number(self, verdict: str) -> int | None:
        """The last number in a verdict; None if there is none or it is out of range."""
        matches = list(re.finditer(self.form.pattern, verdict))
        digits = matches[-1][1] if matches else None
        if digits is None or not digits.isdecimal():
            return None
        number = int(digits)
        return number if self.form.lowest <= number <= self.form.highest else None

    def judge(self, verdicts: Sequence[str]) -> Judgement:
        """The mean of the verdicts' numbers, scaled to [0, 1]; ``unparsed`` if none has one."""
        form = self.form
        numbers = [n for n in map(self.number, verdicts) if n is not None]
        missing = len(verdicts) - len(numbers)
        if not numbers:
            return Judgement(form.unparsed, missing)
        span = len(numbers) * (form.highest - form.lowest)
        return Judgement((sum(numbers) - len(numbers) * form.lowest) / span, missing)

    def overhead(self) -> tuple[int, int]:
        """Tokens of a judge's prompt and verdict beyond the path's: once, and for each step."""
        none = Trajectory(0, (), ())
        chat_tokens = len(self.text.encode_chat([{"role": "user", "content": ""}]))
        return len(self.prompt("", none)) - chat_tokens + self.form.verdict_tokens, 1
