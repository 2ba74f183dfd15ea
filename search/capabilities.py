"""What an engine can do, said aloud: requests are held to it before anything is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Reproducible = Literal["exact", "seeded", "no"]
"""``exact``: bit for bit; ``seeded``: but for rounding; ``no``: draws are fresh ones,
or a verifier may judge a step differently the next time."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, said aloud.

    ``scores``: it gives rewards; ``outcome``: to finished replies alone, not to steps;
    ``likelihood``: these are its policy's log-probabilities, which steps drawn elsewhere have not.
    ``logits_params``: the ``LogitsParams`` that it honours over whole trajectories, by name.
    ``logprobs``: whether it tells those that ``Sampling.logprobs`` asks for; ``grammar``: whether
    it holds to ``Sampling.grammar``; ``grammar_at_once``: in one call from the prompt on alone.
    ``exact``: same seed, same tree, bit for bit. ``seeded``: tokens follow from the branches'
    seeds, up to rounding where the engine is not exact. ``embeds``: what embeds steps (``hidden``,
    ``lexical``, ``encoder`` or ``endpoint``); None if nothing does. ``score_tokens``: what scoring
    a path takes of its context beside its own tokens, once and for every step; ``scored_tokens``:
    that context, 0: ``context_tokens``. ``threads``: of its arithmetic, 0 where they are not its to
    choose; ``kernel``: what computes attention, empty likewise. ``step_logprobs``: steps have
    log-probabilities. ``most_temperature``: the highest one that it draws at.
    """

    engine: str
    models: Mapping[str, str]
    exact: bool
    scores: bool
    embeds: str | None
    context_tokens: int
    fingerprint: str
    score_tokens: tuple[int, int] = (0, 1)
    scored_tokens: int = 0
    seeded: bool = True
    threads: int = 0
    kernel: str = ""
    outcome: bool = False
    likelihood: bool = False
    step_logprobs: bool = True
    logits_params: tuple[str, ...] = ()
    logprobs: bool = False
    most_temperature: float = math.inf
    grammar: bool = False
    grammar_at_once: bool = False

    @property
    def reproducible(self) -> Reproducible:
        """How far the same seed gives the same tree."""
        if self.exact:
            return "exact"
        return "seeded" if self.seeded else "no"
