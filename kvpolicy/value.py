"""Estimate what a block is worth from three signals (ArborKV, section 4 and equation (1)).

Each signal is in [0, 1], or NaN where it is missing: ``v``, the search's own value; ``u``, how sure
the model is of what follows; ``a``, how much later tokens attend to the block.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.float64]
Mode = Literal["exact", "paper"]

SIGNALS = "vua"
SCHEMA = 1
_STEEPEST = 700.0
"""Above this exp overflows float64, and the sigmoid is 0."""
_START = np.zeros(1, dtype=np.int64)
_ALLOWED = frozenset({"schema", "mode", "sets", "source"})


class ThetaError(ValueError):
    """A θ file is wrong; the message names the field, its value and what is allowed."""


def subsets(signals: str) -> tuple[str, ...]:
    """Every subset of some signals, smaller ones first: "", "v", "u", "vu", ..."""
    sizes = range(len(signals) + 1)
    return tuple("".join(letters) for size in sizes for letters in combinations(signals, size))


@dataclass(frozen=True, slots=True)
class Theta:
    """The estimator's coefficients, one set for each subset of signals.

    ``sets["vu"]`` holds the bias and the coefficients of v and u. ``signals`` are those that it was
    fitted on: others are not read, and where one of them is missing, the set without it is used.
    ``source`` describes for people what it was fitted to. Raises ThetaError.
    """

    mode: Mode
    sets: Mapping[str, tuple[float, ...]]
    source: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.mode not in get_args(Mode):
            raise ThetaError(f"mode: {self.mode!r}; one of {', '.join(get_args(Mode))} is needed")
        fitted = "".join(signal for signal in SIGNALS if signal in self.signals)
        if set(self.sets) != set(subsets(fitted)):
            raise ThetaError(
                f"sets: {sorted(self.sets)}; one for every subset of some of the signals "
                f"{SIGNALS!r} is needed, in that order of letters, the empty one included"
            )
        for name, values in self.sets.items():
            if len(values) != len(name) + 1 or not all(map(math.isfinite, values)):
                raise ThetaError(
                    f"sets[{name!r}]: {list(values)}; {len(name) + 1} finite numbers are needed, "
                    "the bias first"
                )

    @property
    def signals(self) -> str:
        """The signals that the estimator was fitted on."""
        return max(self.sets, key=len, default="")

    def only(self, signals: str) -> Theta:
        """The same estimator restricted to these ``signals``."""
        sets = {name: values for name, values in self.sets.items() if set(name) <= set(signals)}
        return replace(self, sets=sets)

    def table(self) -> Floats:
        """(8, 4): for each mask of present signals (v 1, u 2, a 4) bias and coefficients."""
        table = np.zeros((1 << len(SIGNALS), 1 + len(SIGNALS)))
        for mask in range(len(table)):
            present = [s for i, s in enumerate(SIGNALS) if mask >> i & 1 and s in self.signals]
            coefficients = self.sets["".join(present)]
            table[mask, 0] = coefficients[0]
            for signal, value in zip(present, coefficients[1:], strict=True):
                table[mask, 1 + SIGNALS.index(signal)] = value
        return table

    def score(self, v: ArrayLike, u: ArrayLike, a: ArrayLike) -> Floats:
        """s = clip(sigmoid(θ·[1, v, u, a]), 0, 1), elementwise (n,); NaN is a missing signal."""
        return score(self.table(), np.array([v, u, a], dtype=np.float64))

    def as_dict(self) -> dict[str, Any]:
        """The content of a θ file."""
        sets = {name: list(values) for name, values in self.sets.items()}
        return {"schema": SCHEMA, "mode": self.mode, "sets": sets, "source": dict(self.source)}


def score(table: Floats, signals: Floats) -> Floats:
    """Scores (n,) in [0, 1] of ``signals`` (3, n) by ``Theta.table``."""
    present = ~np.isnan(signals)
    coefficients = table[present[0] + 2 * present[1] + 4 * present[2]]
    terms = coefficients[:, 1:].T * np.where(present, signals, 0.0)
    return sigmoid(coefficients[:, 0] + terms[1] + terms[2] + terms[0])


def sigmoid(logits: Floats) -> Floats:
    """1 / (1 + e^-x), elementwise."""
    return 1.0 / (1.0 + np.exp(np.minimum(-logits, _STEEPEST)))


def parse_theta(document: Any) -> Theta:
    """Parse a θ file's JSON object. Raises ThetaError."""
    if not isinstance(document, dict):
        raise ThetaError(f"theta: {type(document).__name__}; an object is needed")
    unknown = sorted(set(document) - _ALLOWED)
    if unknown:
        raise ThetaError(f"{unknown[0]}: unknown; one of {', '.join(sorted(_ALLOWED))} is allowed")
    if document.get("schema") != SCHEMA:
        raise ThetaError(f"schema: {document.get('schema')!r}; {SCHEMA} is needed")
    for name in ("sets", "source"):
        if not isinstance(document.get(name, {}), dict):
            raise ThetaError(f"{name}: {document[name]!r}; an object is needed")
    sets = {}
    for name, values in document.get("sets", {}).items():
        if not isinstance(values, list) or not all(type(v) in (int, float) for v in values):
            raise ThetaError(f"sets[{name!r}]: {values!r}; a list of numbers is needed")
        sets[name] = tuple(map(float, values))
    mode: Any = document.get("mode")
    return Theta(mode, sets, document.get("source", {}))


def load_theta(path: str | Path) -> Theta:
    """Read a θ file. Raises OSError, or ThetaError with the path in it."""
    try:
        return parse_theta(json.loads(Path(path).read_text(encoding="utf-8")))
    except json.JSONDecodeError as error:
        raise ThetaError(f"{path}: not JSON ({error})") from None
    except ThetaError as error:
        raise ThetaError(f"{path}: {error}") from None


def save_theta(theta: Theta, path: str | Path) -> None:
    """Write a θ file."""
    text = json.dumps(theta.as_dict(), indent=2, sort_keys=True)
    Path(path).write_text(text + "\n", encoding="utf-8")


def attention_shares(weights: ArrayLike, tokens: ArrayLike) -> Floats:
    """One token's attention to each block of a path, relative to an even spread, in [0, 1].

    ``weights`` (n,): the token's attention to the path's first n tokens, adding up to 1; ``tokens``
    (blocks,): the blocks' lengths from the path's start on. A block that gets the mass m, and would
    get t if all tokens got the same, has m / (m + t): 0.5 is an even share, whatever the lengths of
    block and path. The last blocks are left out if none of the n tokens is in them.
    """
    weights = np.asarray(weights, dtype=np.float64)
    ends = np.minimum(np.cumsum(np.asarray(tokens, dtype=np.int64)), len(weights))
    starts = np.concatenate((_START, ends[:-1]))
    lengths = ends - starts
    count = int(np.count_nonzero(lengths))
    mass = np.add.reduceat(weights, starts[:count])
    return mass / (mass + lengths[:count] / len(weights))


def confidence(logits: ArrayLike, top: int | None = None) -> Floats:
    """Equation (1): u = 1 - H / log|V| of each row's next-token distribution, in [0, 1].

    ``logits``: (..., vocab of 2 or more), unnormalised, of the row after the block's last token.
    ``top``: count only so many likeliest tokens one by one, and the rest as a single outcome.
    """
    logits = np.asarray(logits, dtype=np.float64)
    vocab = logits.shape[-1]
    shares = np.exp(logits - logits.max(axis=-1, keepdims=True))
    shares /= shares.sum(axis=-1, keepdims=True)
    if top is not None and top < vocab:
        top_shares = np.partition(shares, vocab - top, axis=-1)[..., vocab - top :]
        rest = np.clip(1.0 - top_shares.sum(axis=-1, keepdims=True), 0.0, None)
        shares = np.concatenate([top_shares, rest], axis=-1)
    terms = shares * np.log(np.where(shares > 0, shares, 1.0))
    return np.maximum(1.0 + terms.sum(axis=-1) / math.log(vocab), 0.0)


def _starting_sets() -> dict[str, tuple[float, ...]]:
    """Every set gives sigmoid(4 m - 2), where m is the mean of the signals that are present."""
    return {
        name: (-2.0, *[4.0 / len(name)] * len(name)) if name else (0.0,)
        for name in subsets(SIGNALS)
    }


UNFITTED = Theta("exact", _starting_sets(), {"note": "not fitted: the mean of the signals"})
"""The estimator to use where nothing has been recorded."""
