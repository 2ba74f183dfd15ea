"""Chains of steps in one request: where a step ends, the next one's seed begins.

A chain that no reward steers needs no decision between its steps. Its request brings the seeds of
all steps, and the first request of its list also how steps end, by token ids, because SGLang reads
stop strings differently; both are ``custom_params``:

    {"hedgerow_chain": "{\"seeds\": [-17, 4, ...], \"most\": 256, \"ends\": \"1f..\"}",
     "hedgerow_ends": "{\"name\": \"1f..\", \"moves\": [{\"7\": 1}, {\"7\": -1}]}"}

It ends with the model's end token, after its last step, or after a step that repeats the one
before. Imports neither SGLang nor torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hedgerow_sglang.plugin_protocol import NoteError

CHAIN, ENDS = "hedgerow_chain", "hedgerow_ends"
ENDED = -1
"""Stands in ``moves`` for a state: the token ends its step."""


@dataclass(frozen=True, slots=True)
class StepEnds:
    """Which tokens end a step: an automaton over the bytes that may begin a stop string.

    ``moves``: for each state the next state by token id; other tokens lead to state 0, the first.
    """

    moves: tuple[Mapping[int, int], ...]

    @classmethod
    def of(cls, pieces: Sequence[bytes], stops: Sequence[bytes]) -> StepEnds:
        """``pieces``: each token id's bytes; ``stops``: the stop strings, none empty."""
        heads = sorted({stop[:at] for stop in stops for at in range(len(stop))}, key=len) or [b""]
        places = {text: place for place, text in enumerate(heads)}
        letters = frozenset(b"".join(stops))
        able = [(t, p) for t, p in enumerate(pieces) if not p or letters & frozenset(p)]
        longest = max(map(len, heads))

        def move(text: bytes) -> int:
            if any(stop in text for stop in stops):
                return ENDED
            tails = (text[len(text) - size :] for size in range(min(longest, len(text)), 0, -1))
            return next((places[tail] for tail in tails if tail in places), 0)

        moves = [{token: move(text + piece) for token, piece in able} for text in heads]
        return cls(tuple({t: to for t, to in state.items() if to} for state in moves))

    @property
    def name(self) -> str:
        """16 hex digits over ``moves``."""
        return hashlib.blake2b(self._moves_json().encode(), digest_size=8).hexdigest()

    def param(self) -> dict[str, str]:
        """The ``custom_params`` entry for the first request of a list of chains."""
        moves = self._moves_json()
        return {ENDS: f'{{"name":"{self.name}","moves":{moves}}}'}

    def _moves_json(self) -> str:
        return json.dumps(self.moves, separators=(",", ":"))


def parse_ends(text: object) -> tuple[str, StepEnds]:
    """The name of a request's ``StepEnds``, and these. Raises NoteError."""
    fields = _object(ENDS, text)
    moves = fields.get("moves")
    if not isinstance(moves, list) or not moves or not all(isinstance(m, dict) for m in moves):
        raise NoteError(f"{ENDS}: moves: a list of objects, one a state, is needed")
    try:
        states = tuple({int(token): to for token, to in state.items()} for state in moves)
    except ValueError:
        raise NoteError(f"{ENDS}: moves: tokens are whole numbers") from None
    least, most = ENDED, len(states)
    if not all(type(to) is int and least <= to < most for state in states for to in state.values()):
        raise NoteError(f"{ENDS}: moves: lead to states from 0 to {most - 1}, or to {ENDED}")
    return _name(fields.get("name")), StepEnds(states)


@dataclass(slots=True)
class StepChain:
    """A chain on its way: the seeds of its steps, and how far it has been followed.

    ``most``: most tokens of a step; ``ends``: the name of its ``StepEnds``.
    """

    seeds: tuple[int, ...]
    most: int
    ends: str
    over: bool = False
    """Whether the chain is complete and nothing more is to be drawn."""
    _followed: int = 0
    _state: int = 0
    _step: int = 0
    _tokens: list[int] = field(default_factory=list)
    _last_tokens: list[int] = field(default_factory=list)

    def param(self) -> dict[str, str]:
        """The entry for its request's ``custom_params``."""
        fields = {"seeds": self.seeds, "most": self.most, "ends": self.ends}
        return {CHAIN: json.dumps(fields, separators=(",", ":"))}

    def follow(self, tokens: Sequence[int], ends: StepEnds) -> int:
        """The seed of the next token; ``tokens``: all that the request has drawn."""
        for token in tokens[self._followed :]:
            self._tokens.append(token)
            self._state = ends.moves[self._state].get(token, 0)
            step_ends = self._state == ENDED
            if step_ends or len(self._tokens) == self.most:
                self.over = self.over or (step_ends and self._tokens == self._last_tokens)
                self._step, self._state = self._step + 1, 0
                self._last_tokens, self._tokens = self._tokens, []
        self._followed = len(tokens)
        self.over = self.over or self._step >= len(self.seeds)
        return self.seeds[min(self._step, len(self.seeds) - 1)]


def parse_chain(text: object) -> StepChain:
    """Parse a request's chain, not yet followed. Raises NoteError."""
    fields = _object(CHAIN, text)
    seeds, most = fields.get("seeds"), fields.get("most")
    if not isinstance(seeds, list) or not seeds or not all(map(_is_seed, seeds)):
        raise NoteError(f"{CHAIN}: seeds: a list of signed 64-bit numbers is needed")
    if type(most) is not int or most < 1:
        raise NoteError(f"{CHAIN}: most: {most!r}; a whole number from 1 on is needed")
    return StepChain(tuple(seeds), most, _name(fields.get("ends")))


def _is_seed(value: object) -> bool:
    return type(value) is int and -(1 << 63) <= value < 1 << 63


def _object(name: str, text: object) -> dict[str, Any]:
    try:
        fields = json.loads(text) if isinstance(text, str) else None
    except (ValueError, RecursionError):
        fields = None
    if not isinstance(fields, dict):
        raise NoteError(f"{name}: a string of JSON that is an object is needed")
    return fields


def _name(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise NoteError(f"{CHAIN}: ends: {value!r}; the name of how steps end is needed")
    return value
