r"""Whether two answers to a maths question are equal, by ``math-verify``, within stated sizes.

Its time limits are off: they are wall-clock ones, which would make an answer depend on the
machine's load, and they need signals. Instead, it never gets input that could take long. Only LaTeX
of known commands, a few brackets deep, is parsed, since the parser's time grows exponentially with
depth and some commands, such as ``\binom``, are evaluated while parsing. Only expressions that
stay small when multiplied out are compared. All other answers are compared as strings.
"""

from __future__ import annotations

import logging
import re
from dataclasses import dataclass
from functools import cache
from math import comb, prod
from threading import Lock
from zlib import crc32

import sympy
from math_verify import LatexExtractionConfig, parse, verify
from sympy.core.numbers import ImaginaryUnit
from sympy.core.relational import Relational
from sympy.functions.elementary.trigonometric import (
    InverseTrigonometricFunction,
    TrigonometricFunction,
)
from sympy.logic.boolalg import BooleanAtom

log = logging.getLogger("hedgerow.maths")
for library in ("math_verify.parser", "math_verify.grader"):
    logging.getLogger(library).setLevel(logging.ERROR)  # they warn that their time limits are off

MOST_CHARACTERS = 120
MOST_BRACKETS = 5
"""The deepest nesting of brackets."""
MOST_DIGITS = 40
MOST_PARTS = 60
"""The most operators, numbers and symbols of an expression."""
MOST_PARTS_SOLVED = 24
"""The same for an equation or inequality, which is solved and so must be polynomial, too."""
MOST_POWER_SOLVED = 2
MOST_TERMS = 60
"""The most terms of an expression when all powers of sums are multiplied out."""
MOST_POWER = 16
MOST_COMPARED = 128
"""The most pairs of answers that math-verify compares in a search; others differ by spelling."""
ONE_AT_A_TIME = Lock()
FAR = 1e-5
"""Values further apart than this, absolutely and relatively, are not equal to six decimals."""

COMMANDS = frozenset(
    re.findall(
        r"\w+",
        "frac dfrac tfrac sqrt cdot times div left right pi sin cos tan cot sec csc arcsin arccos "
        "arctan ln log exp infty cup cap in le leq ge geq ne neq lt gt circ alpha beta gamma delta "
        "theta lambda mu phi omega",
    )
)
SIGNS = re.compile(r"[\d\\+*/^=<>-]")
WORDS = re.compile(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}")
COMMAND = re.compile(r"\\([a-zA-Z]+)")
UNSAFE = re.compile(rf"[!$|\n]|\d{{{MOST_DIGITS + 1},}}")
NUMBER = re.compile(r"[+-]?\d{1,15}(?:\.\d{1,15})?")
PLAIN = (
    sympy.Add,
    sympy.Mul,
    sympy.Pow,
    sympy.Number,
    sympy.NumberSymbol,
    sympy.Symbol,
    sympy.UnevaluatedExpr,
    ImaginaryUnit,
    BooleanAtom,
)
FUNCTIONS = (sympy.exp, sympy.log, TrigonometricFunction, InverseTrigonometricFunction)
GROUPS = (sympy.Tuple, sympy.FiniteSet, sympy.Interval, sympy.Union, sympy.Intersection)
SOLVED = (Relational, sympy.And)


class Maths:
    """The comparisons of one search's answers; each answer is parsed once.

    ``unread``: the number of answers that look like maths but exceed a size or do not parse.
    """

    def __init__(self) -> None:
        self.unread = 0
        self._compared = 0
        self._parsed_once = cache(self._parse)

    def same(self, first: str, other: str) -> bool:
        """Whether two answers are equal by math-verify, either of them being the reference.

        Searches call this from their own threads; the parser handles one call at a time.
        """
        with ONE_AT_A_TIME:
            return self._same(first, other)

    def _same(self, first: str, other: str) -> bool:
        if _far_apart(first, other) or self._compared == MOST_COMPARED:
            return False
        left, right = self._parsed_once(first), self._parsed_once(other)
        if left is None or right is None or _differ(left, right):
            return False
        self._compared += 1
        pairs = (left, right), (right, left)
        return any(verify(a.tree, b.tree, timeout_seconds=0) for a, b in pairs)

    def _parse(self, answer: str) -> Expression | None:
        if not looks_like_maths(answer):
            return None
        expression = read(answer)
        if expression is None:
            self.unread += 1
            log.info("comparing %r as it is written: too large, or not readable", answer)
        return expression


@dataclass(frozen=True, slots=True)
class Expression:
    """A parsed answer; ``value``: its number at fixed values of its symbols, None without one."""

    tree: sympy.Basic
    value: complex | None


def looks_like_maths(answer: str) -> bool:
    """Whether there are digits, operators or commands, and no words such as 'Paris'."""
    return bool(SIGNS.search(answer)) and not WORDS.search(answer)


def read(answer: str) -> Expression | None:
    """Parse an answer; None if that fails or one of the sizes above is exceeded."""
    if len(answer) > MOST_CHARACTERS or UNSAFE.search(answer) or _depth(answer) > MOST_BRACKETS:
        return None
    if not COMMANDS.issuperset(COMMAND.findall(answer)):
        return None
    trees = parse(
        f"${answer}$",
        [LatexExtractionConfig()],
        fallback_mode="no_fallback",
        parsing_timeout=0,  # no limit
    )
    tree = trees[0] if trees else None
    if not isinstance(tree, sympy.Basic) or not _small(tree):
        return None
    return Expression(tree, _value(tree))


def _depth(text: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in "({[") - (character in ")}]")
        deepest = max(deepest, depth)
    return deepest


def _small(tree: sympy.Basic) -> bool:
    parts = list(sympy.preorder_traversal(tree))
    solved = any(isinstance(part, SOLVED) for part in parts)
    types = PLAIN + GROUPS + (SOLVED if solved else FUNCTIONS)
    powers = [part for part in parts if isinstance(part, sympy.Pow | sympy.exp)]
    return (
        len(parts) <= (MOST_PARTS_SOLVED if solved else MOST_PARTS)
        and all(isinstance(part, types) for part in parts)
        and all(_tame(power) for power in powers)
        and not (
            solved and any(power.args[1] not in range(MOST_POWER_SOLVED + 1) for power in powers)
        )
        and _terms(tree) <= MOST_TERMS
    )


def _tame(power: sympy.Basic) -> bool:
    """Whether a power is cheap to evaluate: a small exponent, and no towers of numbers."""
    base, exponent = (sympy.E, *power.args) if len(power.args) == 1 else power.args
    if isinstance(exponent, sympy.Integer) and isinstance(base, sympy.Number):
        return abs(int(exponent)) * len(str(base)) <= MOST_POWER * MOST_DIGITS
    if isinstance(exponent, sympy.Rational):
        return abs(exponent.p) <= MOST_POWER and exponent.q <= MOST_POWER
    above = [p for p in sympy.preorder_traversal(exponent) if isinstance(p, sympy.Pow | sympy.exp)]
    return all(power.args[0].is_Symbol for power in above)


def _terms(tree: sympy.Basic) -> int:
    """The number of terms when everything is multiplied out, at least 1."""
    if isinstance(tree, sympy.Pow) and isinstance(tree.args[1], sympy.Integer):
        n, power = _terms(tree.args[0]), abs(int(tree.args[1]))
        return comb(n + power - 1, power)
    terms = [_terms(part) for part in tree.args] or [1]
    return prod(terms) if isinstance(tree, sympy.Mul) else sum(terms)


def _value(tree: sympy.Basic) -> complex | None:
    parts = list(sympy.preorder_traversal(tree))
    if any(isinstance(part, (*GROUPS, *SOLVED, sympy.UnevaluatedExpr)) for part in parts):
        return None
    at = {s: sympy.Rational(1 + crc32(str(s).encode()) % 997, 499) for s in tree.free_symbols}
    try:
        return complex(tree.subs(at).evalf())  # type: ignore[attr-defined]
    except (TypeError, ValueError, OverflowError):  # such as 1/0
        return None


def _differ(left: Expression, right: Expression) -> bool:
    """Whether the values prove that the two are not equal; far cheaper than comparing symbols."""
    if left.value is None or right.value is None:
        return False
    return abs(left.value - right.value) > FAR * max(1.0, abs(left.value))


def _far_apart(first: str, other: str) -> bool:
    """Whether two plain numbers are not equal, without parsing them as LaTeX."""
    if not NUMBER.fullmatch(first) or not NUMBER.fullmatch(other):
        return False
    return abs(float(first) - float(other)) > FAR * max(1.0, abs(float(first)))
