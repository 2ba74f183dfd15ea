"""How a policy model writes: where its steps end and how it states its answer."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Profile:
    """A family of policy models. ``delimiter`` ends a step; ``answer`` is a regular expression
    whose first group is the final answer."""

    name: str
    delimiter: str = "\n\n"
    answer: str = r"(?:The|the) (?:final )?answer is:?\s*(.+?)\s*(?:$|\n)"


PROFILES: dict[str, Profile] = {
    "sprig": Profile("sprig", answer=r"The answer is (.+?)\s*(?:$|\n)"),
    "llama": Profile("llama", answer=r"\\boxed\{(.+)\}"),
    "qwen": Profile("qwen", answer=r"\\boxed\{(.+)\}"),
    "llemma": Profile("llemma", delimiter="ки", answer=r"The answer is:?\s*(.+?)\s*(?:ки|$|\n)"),
    "mistral-metamath": Profile(
        "mistral-metamath", delimiter="ки", answer=r"The answer is:?\s*(.+?)\s*(?:ки|$|\n)"
    ),
}
