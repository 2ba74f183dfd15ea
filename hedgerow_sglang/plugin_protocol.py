"""The protocol between a client and our plug-in inside SGLang. Imports neither SGLang nor torch.

A note travels in-band: on an ordinary ``/generate`` request, under its sampling parameters, as one
string of JSON (SGLang passes on nothing nested):

    {"input_ids": [...], "sampling_params": {
        "sampling_seed": -17,
        "custom_params": {"hedgerow": "{\"tree\": \"key/t1\", \"prompt\": 57, ...}"}}}

``sampling_seed(seed)`` and ``custom_params(note)`` make both. The note of a request that draws
or scores a step says which search it is for (``tree``, ``prompt``), which step (``node``,
``parent``), and in which round (``turn``, from 1 on). The first request of a round that goes to a
server, as the first item of its list, brings the search's hint along; the others leave it out:

- ``values``: the rewards that are new since the last hint, by node. A node without a reward of its
  own has its parent's. A server that has not seen the tree yet needs all rewards.
- ``active``: the ids of the nodes that the round expands; ``dead``: of those that died since the
  last hint. What is cached of dead nodes is freed when the note arrives.
- ``outlook``: the nodes that the search would expand next, the first one first, if no reward
  changed; left out by a search that cannot say. It takes precedence over rewards.

A hint whose ``turn`` is not above that of the last one taken is ignored: the same hint may come
with several requests, which arrive in any order.

``over`` names searches that have ended, this one or others: all but their prompts is freed. A note
that is about no step leaves ``node`` and ``parent`` out; a request with one token and
``max_new_tokens`` 0 carries it when there is nothing else to ask. A request without a note is
served as SGLang serves it, and its KV is evicted first.

Node ids are those of ``search.tree``: 0 is the prompt, and a parent's id is lower than its
children's. An invalid note is refused with status 400 and a message naming the field.

``GET /server_info`` shows what the plug-in has done, see ``plugin_counts``.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

NAME = "hedgerow"
"""The note's key, and the plug-in's in ``/server_info``."""
BACKENDS: Mapping[str, str] = {"arborkv": NAME}
"""Our ``--radix-cache-backend`` for each ``--kv-policy`` that it implements
(``caches.CACHES``); any other order is SGLang's own."""
COUNTS = (
    "held_tokens",
    "cached_tokens",
    "evicted_tokens",
    "split_evicted_tokens",
    "freed_tokens",
    "recomputed_tokens",
    "searches",
)

OUTPUT = "hedgerow_output"
"""The key in a request's ``custom_params`` that says where in its prompt the output began."""
ABLE = ("evicts", "seeds", "chains", "outputs")
"""Abilities that the plug-in may have on a server, each counted as 1 or 0."""

REWARD_MODELS = "hedgerow_sglang.reward_models"
"""Value for ``SGLANG_EXTERNAL_MODEL_PACKAGE``: reward models that SGLang lacks or loads wrongly."""
REWARD_CLASSES = (
    "Qwen2ForPrmModel",
    "Qwen2ForProcessRewardModel",
    "Qwen2ForSequenceClassification",
    "Qwen3ForSequenceClassification",
)
"""The names of these classes, as checkpoints have them under ``architectures``."""

_WORD = 1 << 64
_MOST = 1 << 31
_MOST_ID = 1 << 20
_SHORT = 512
"""Most characters of a note without a hint. Each process of SGLang parses a note twice."""
_NEEDED: Mapping[str, Any] = {"tree": None, "prompt": None}
"""The required fields, None in a note that leaves them out."""


class NoteError(ValueError):
    """An invalid note; the message names the field, its value and what is allowed."""


class Note(NamedTuple):
    """What a request says about its search, with the fields above. ``prompt``: length in tokens."""

    tree: str
    prompt: int
    node: int | None = None
    parent: int | None = None
    turn: int = 0
    values: Mapping[int, float] = MappingProxyType({})
    active: tuple[int, ...] = ()
    dead: tuple[int, ...] = ()
    outlook: tuple[int, ...] = ()
    over: tuple[str, ...] = ()

    @property
    def hints(self) -> bool:
        """Whether it brings a hint."""
        return bool(self.values or self.active or self.dead or self.outlook)


def sampling_seed(seed: int) -> int:
    """A seed in [0, 2^64) as SGLang takes it: the same 64 bits, signed."""
    return seed - _WORD if seed >= _WORD >> 1 else seed


def custom_params(note: Note) -> dict[str, str]:
    """The note as a request's ``custom_params``; fields that say nothing are left out."""
    fields: dict[str, Any] = {"tree": note.tree, "prompt": note.prompt}
    for name in ("node", "parent"):
        if getattr(note, name) is not None:
            fields[name] = getattr(note, name)
    for name in ("turn", "values", "active", "dead", "outlook", "over"):
        if getattr(note, name):
            fields[name] = getattr(note, name)
    return {NAME: json.dumps(fields, separators=(",", ":"))}


def parse_note(text: object) -> Note:
    """Parse the note of a request. Raises NoteError."""
    if not isinstance(text, str):
        raise NoteError(f"{NAME}: {type(text).__name__}; a string of JSON is needed")
    return _parse_short(text) if len(text) <= _SHORT else _parse_long(text)


def _parse(text: str) -> Note:
    try:
        fields = json.loads(text)
    except (ValueError, RecursionError):
        raise NoteError(f"{NAME}: not JSON") from None
    if not isinstance(fields, dict):
        raise NoteError(f"{NAME}: {type(fields).__name__}; an object is needed")
    unknown = fields.keys() - _READERS.keys()
    if unknown:
        raise NoteError(f"{min(unknown)}: unknown; one of {', '.join(sorted(_READERS))} is allowed")
    kwargs = {name: _READERS[name](name, value) for name, value in {**_NEEDED, **fields}.items()}
    node, parent = kwargs.get("node"), kwargs.get("parent")
    if (node is None) != (parent is None):
        raise NoteError(
            f"{'node' if parent is None else 'parent'}: alone; node and parent go together"
        )
    if node is not None and not parent < node:
        raise NoteError(f"node: {node}; an id above its parent's {parent}")
    return Note(**kwargs)


_parse_short = lru_cache(maxsize=1 << 13)(_parse)
_parse_long = lru_cache(maxsize=16)(_parse)


def plugin_counts(server_info: Mapping[str, Any]) -> dict[str, int] | None:
    """The plug-in's counts, summed over all schedulers of a server; None if any scheduler lacks it.

    ``server_info``: what ``GET /server_info`` gives. In tokens: ``held_tokens``, cached now for
    searches in flight; ``cached_tokens``, all that is cached; since the start ``evicted_tokens``,
    to make room, of them ``split_evicted_tokens`` off the tip of a block whose head stayed;
    ``freed_tokens``, of nodes that had died and searches that had ended; ``recomputed_tokens``, of
    prefixes that searches had read before. ``searches`` in flight. ``evicts``: 1 if the plug-in
    decides what goes, 0 where the server runs another cache backend; ``seeds``: 1 if it samples by
    seed; ``chains``: 1 if it changes seeds where steps end (``hedgerow_sglang.step_chain``);
    ``outputs``: 1 if penalties count what was drawn before (``hedgerow_sglang.past_output``).
    """
    states = [state.get(NAME) for state in server_info.get("internal_states", ())]
    counts = [state for state in states if state]
    if not counts or len(counts) < len(states):
        return None
    total = {name: sum(int(state.get(name, 0)) for state in counts) for name in COUNTS}
    return total | {name: min(int(state.get(name, 0)) for state in counts) for name in ABLE}


def _whole(name: str, value: object, least: int = 0) -> int:
    if type(value) is not int or not least <= value < _MOST:
        raise NoteError(f"{name}: {value!r}; a whole number from {least} on is needed")
    return value


def _id(name: str, value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST_ID:
        raise NoteError(f"{name}: {value!r}; a node's id, from 0 to {_MOST_ID - 1}, is needed")
    return value


def _ids(name: str, value: object) -> tuple[int, ...]:
    return tuple(_id(name, node) for node in _list(name, value))


def _name(name: str, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise NoteError(f"{name}: {value!r}; the name of a search is needed")
    return value


def _names(name: str, value: object) -> tuple[str, ...]:
    return tuple(_name(name, tree) for tree in _list(name, value))


def _list(name: str, value: object) -> list[Any]:
    if not isinstance(value, list):
        raise NoteError(f"{name}: {value!r}; a list is needed")
    return value


def _values(name: str, value: object) -> dict[int, float]:
    if not isinstance(value, dict):
        raise NoteError(f"{name}: {value!r}; an object of rewards by node is needed")
    values = {}
    for key, reward in value.items():
        if type(reward) not in (int, float) or not 0 <= reward <= 1:
            raise NoteError(f"{name}: {reward!r} of node {key}; from 0 to 1 is needed")
        values[_id(name, int(key) if key.isdecimal() and len(key) < 10 else key)] = float(reward)
    return values


_READERS: Mapping[str, Callable[[str, object], Any]] = {
    "tree": _name,
    "prompt": partial(_whole, least=1),
    "node": _id,
    "parent": _id,
    "turn": _whole,
    "values": _values,
    "active": _ids,
    "dead": _ids,
    "outlook": _ids,
    "over": _names,
}


def output_param(start: int) -> dict[str, int]:
    """The ``custom_params`` entry saying that the output began at place ``start`` of the prompt."""
    return {OUTPUT: start}


def parse_output(value: object) -> int:
    """The place in the prompt where the output began. Raises NoteError."""
    if type(value) is not int or value < 0:
        raise NoteError(f"{OUTPUT}: {value!r}; a place in the prompt, from 0 on, is needed")
    return value
