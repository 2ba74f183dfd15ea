"""A bundled verifier: whether the arithmetic that a step states is right.

``30 - 6 = 24`` is right, ``9 / 4 = 3`` is wrong, and a step that states none counts as right. Each
``=`` between two expressions of numbers, one of which has an operator, is checked with exact
fractions. What might mean something else (variables, units amid a sum, roots, percentages, ``half
of 10 + 2``) is not checked, because a wrong verdict would cost a right branch. A stated decimal
fraction may be the rounded value of one without an end: ``10 / 3 = 3.33``.

Nothing is evaluated as code. Numbers and powers have bounded sizes, nesting is a stack, and the
work is linear in the text's length.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import pairwise
from typing import Any, NamedTuple

MOST_DIGITS = 40
"""Most characters of a number that is checked."""
MOST_BITS = 512
"""Most bits of a numerator or denominator in between."""

_FRACTION = re.compile(r"\\[dt]?frac\{([^{}]{1,80})\}\{([^{}]{1,80})\}")
_WRAPPED = re.compile(r"\\(?:text|textbf|mathrm|mathbf|mbox|boxed)\{([^{}]{0,200})\}")
_POWER = re.compile(r"\^\{([0-9]{1,4})\}")
_LIST_MARK = re.compile(r"(?m)^[ \t]*(?:[-*•+>#]+[ \t]+|\(?[0-9]{1,3}[.)][ \t]+)")
_TOKEN = re.compile(
    r"""
      (?P<skip> \\(?:left|right|quad|displaystyle)(?![a-zA-Z]) | \\[,;:!\x20$] | [^\S\n]+ | [$&] )
    | (?P<unknown_sign> [<>!:]= | \(\s{0,9}mod\b )
    | (?P<gap> \n | \\[\[\]()\\] | ={1,2}> | -{1,2}> | [→⇒;?!…"“”`,:] | \.(?![0-9]) )
    | (?P<power> \^ | (?<=[0-9)])\*\*(?=[0-9(]) )
    | (?P<bold> \*\* )
    | (?P<times> (?<=[0-9)])\s{0,3}[xX]\s{0,3}(?=[0-9(]) | \\(?:times|cdot)(?![a-zA-Z]) | [*×·∙] )
    | (?P<over> \\div(?![a-zA-Z]) | [/÷] )
    | (?P<plus> \+ )
    | (?P<minus> [-−] )
    | (?P<equals> ={1,2} )
    | (?P<open> [(\[] )
    | (?P<close> [)\]] )
    | (?P<number> \.?[0-9](?:[.,:]?[0-9])* )
    | (?P<glued> (?<=[0-9])[^\W\d_]+ | [^\W\d_]+[0-9_] )
    | (?P<word> (?: [^\W\d_]{2,} | [aAI](?=\x20[^\W\d_]{2}) )(?:['’-][^\W\d_]+)* )
    | (?P<unknown> \\[a-zA-Z]+ | . )
    """,
    re.VERBOSE,
)
_SIGNS = {"power": "^", "times": "*", "over": "/", "plus": "+", "minus": "-"}
_PLAIN_NUMBER = re.compile(r"(?:[0-9]+|[0-9]{1,3}(?:,[0-9]{3})+)?(?:\.[0-9]+)?")
_BINDS = {"(": 0, "+": 1, "-": 1, "*": 2, "/": 2, "negative": 3, "^": 4}
_CHANGES_WHAT_FOLLOWS = frozenset(
    re.findall(
        r"\w+",
        """of than half twice thrice double triple times plus minus by over from to less more per
        sum difference product quotient square root cube power log ln exp sin cos tan sqrt max min
        gcd lcm mod base negative step part case line equation question problem""",
    )
)
_CHANGES_WHAT_PRECEDES = frozenset(
    re.findall(
        r"\w+",
        """and hundred thousand million billion dozen percent mod modulo base times remainder rem
        squared cubed factorial choose plus minus over divided multiplied more less to""",
    )
)


class Number(NamedTuple):
    """A number in the text; ``places``: digits after its decimal point."""

    value: Fraction
    places: int


class Token(NamedTuple):
    """``kind``: ``n`` a number, ``o`` an operator, ``(``, ``)``, ``=``, ``w`` a word, ``|`` a gap
    between statements, ``?`` what is not understood."""

    kind: str
    content: str | Number = ""


class Unreadable(Exception):
    """An expression has more than numbers and operators, or is too large."""


def verify(batch: Sequence[Mapping[str, Any]]) -> list[float]:
    """1.0 or 0.0 for the last of each path's ``steps``: 0.0 if an equation in it is wrong."""
    return [0.0 if has_wrong_equation(path["steps"][-1]) else 1.0 for path in batch]


verify.pure = True  # pyright: ignore[reportFunctionMemberAccess]


def has_wrong_equation(text: str) -> bool:
    """Whether one of the equations in a step's text is wrong."""
    for sides in _equations(_tokens(_without_markup(text))):
        for left, right in pairwise(sides):
            if _differ(_after_words(left), _before_words(right)):
                return True
    return False


def _without_markup(text: str) -> str:
    text = _LIST_MARK.sub("", text)
    text = _FRACTION.sub(r"((\1)/(\2))", text)
    return _POWER.sub(r"^\1", _WRAPPED.sub(r" \1 ", text))


def _tokens(text: str) -> Iterator[Token]:
    """The tokens of a text, with parentheses only where they group: one that follows a value after
    a space begins a remark and is a gap, as is one that closes nothing."""
    depth, before, end = 0, Token("|"), -1
    for match in _TOKEN.finditer(text):
        kind = str(match.lastgroup)
        if kind in ("skip", "bold"):
            continue
        token = _token(kind, match[0])
        if token.kind == "(" and before.kind in ("n", ")"):
            token = Token("?" if match.start() == end else "|")
        elif token.kind == ")" and not depth:
            token = Token("|")
        depth = 0 if token.kind == "|" else depth + (token.kind == "(") - (token.kind == ")")
        before, end = token, match.end()
        yield token


def _token(kind: str, text: str) -> Token:
    if kind in _SIGNS:
        return Token("o", _SIGNS[kind])
    if kind == "number":
        number = _number(text)
        return Token("?") if number is None else Token("n", number)
    kinds = {"gap": "|", "equals": "=", "open": "(", "close": ")", "word": "w"}
    return Token(kinds.get(kind, "?"), text.lower())


def _number(text: str) -> Number | None:
    """A number; None for what is not a plain one (a date, a time, a decimal comma) or too long."""
    if len(text) > MOST_DIGITS or not _PLAIN_NUMBER.fullmatch(text):
        return None
    plain = text.replace(",", "")
    return Number(Fraction(plain), len(plain.partition(".")[2]))


def _equations(tokens: Iterator[Token]) -> Iterator[list[list[Token]]]:
    """The sides of each statement that has more than one."""
    sides: list[list[Token]] = [[]]
    for token in (*tokens, Token("|")):
        if token.kind == "|":
            if len(sides) > 1:
                yield sides
            sides = [[]]
        elif token.kind == "=":
            sides.append([])
        else:
            sides[-1].append(token)


def _after_words(side: list[Token]) -> list[Token]:
    """The part of a side before an ``=`` that follows its last word; empty if it is ambiguous."""
    words = _words(side)
    if words is None or (words and side[words[-1]].content in _CHANGES_WHAT_FOLLOWS):
        return []
    return side[words[-1] + 1 :] if words else side


def _before_words(side: list[Token]) -> list[Token]:
    """The part of a side after an ``=`` up to its first word; empty if it is ambiguous."""
    words = _words(side)
    if words is None or (words and side[words[0]].content in _CHANGES_WHAT_PRECEDES):
        return []
    return side[: words[0]] if words else side


def _words(side: list[Token]) -> list[int] | None:
    """The places of a side's words; None if it is not understood: if it has an unknown token, or a
    word next to an operator."""
    kinds = "".join(token.kind for token in side)
    if "?" in kinds or "wo" in kinds or "ow" in kinds:
        return None
    return [i for i, kind in enumerate(kinds) if kind == "w"]


def _differ(left: list[Token], right: list[Token]) -> bool:
    """Whether two sides are numeric expressions, one of them with an operator, of unequal value."""
    left, right = _balanced(left), _balanced(right)
    if not any(token.kind == "o" for side in (left, right) for token in side[1:]):
        return False
    try:
        first, second = _value(left), _value(right)
    except Unreadable:
        return False
    except ZeroDivisionError:
        return True
    return first != second and not (_rounds(first, right) or _rounds(second, left))


def _rounds(value: Fraction, stated: list[Token]) -> bool:
    """Whether a side is a decimal fraction that rounds ``value``, which has no finite decimals."""
    number = stated[-1].content
    literal = len(stated) - (stated[0] == Token("o", "-")) == 1
    if not literal or not isinstance(number, Number) or not number.places:
        return False
    ends = pow(10, MOST_BITS, value.denominator) == 0
    return not ends and abs(value - _value(stated)) * 2 * 10**number.places <= 1


def _balanced(side: list[Token]) -> list[Token]:
    """A side without unmatched parentheses at its ends, which enclose the whole equation."""
    kinds = [token.kind for token in side]
    extra = kinds.count("(") - kinds.count(")")
    if extra > 0 and kinds[:extra] == ["("] * extra:
        return side[extra:]
    if extra < 0 and kinds[extra:] == [")"] * -extra:
        return side[:extra]
    return side


def _value(side: list[Token]) -> Fraction:
    """The value of an expression. Raises Unreadable and ZeroDivisionError."""
    values: list[Fraction] = []
    signs: list[str] = []
    wants_value = True
    for kind, content in side:
        if wants_value and isinstance(content, Number):
            values.append(content.value)
            wants_value = False
        elif wants_value and kind == "(":
            signs.append("(")
        elif wants_value and content == "-":
            signs.append("negative")
        elif not wants_value and kind == "o":
            sign = str(content)
            _work_off(values, signs, _BINDS[sign] + (sign == "^"))
            signs.append(sign)
            wants_value = True
        elif not wants_value and kind == ")":
            _work_off(values, signs, 1)
            if not signs:
                raise Unreadable
            signs.pop()
        else:
            raise Unreadable
    if wants_value or "(" in signs:
        raise Unreadable
    _work_off(values, signs, 1)
    return values[0]


def _work_off(values: list[Fraction], signs: list[str], least: int) -> None:
    """Apply the signs on top of the stack whose precedence is at least ``least``."""
    while signs and _BINDS[signs[-1]] >= least:
        sign = signs.pop()
        right = values.pop()
        values.append(-right if sign == "negative" else _apply(sign, values.pop(), right))


def _apply(sign: str, left: Fraction, right: Fraction) -> Fraction:
    bits, other_bits = _bits(left), _bits(right)
    if sign == "^":
        if right.denominator != 1 or not 0 <= right <= MOST_BITS or bits * int(right) > MOST_BITS:
            raise Unreadable
        return Fraction(left ** int(right))
    if bits + other_bits > MOST_BITS:
        raise Unreadable
    if sign == "*":
        return left * right
    if sign == "/":
        return left / right
    return left + right if sign == "+" else left - right


def _bits(value: Fraction) -> int:
    return max(value.numerator.bit_length(), value.denominator.bit_length())
