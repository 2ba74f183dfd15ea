"""Guesses in the making: a branch's sequence in the draft's cache, a token longer with every
pass."""

from __future__ import annotations

from collections.abc import Sequence

from runtime.embedded.draft_tree import DraftBranch, DraftTree, OfferedCandidates, trimmed
from runtime.embedded.expand_call import BranchSequence
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.rejection_sampling import CandidateOffer, Floats
from runtime.embedded.sequence import TokenSequence


class DraftTreeBuilder:
    """The ways of one branch; all of them are equally deep until they end."""

    def __init__(
        self,
        run: BranchSequence,
        sequence: TokenSequence,
        widths: Sequence[int],
        eos: frozenset[int],
    ) -> None:
        """``widths``: how many tokens to guess at each depth, after each guess before it."""
        self.run = run
        self._sequence = sequence
        self._widths = widths
        self._eos = eos
        self._last: dict[DraftBranch | None, int] = {}
        self._tips: list[DraftBranch] = []
        self._offers: OfferedCandidates = {}

    def position(self, way: DraftBranch | None) -> int:
        """The absolute position of the token that comes next on a way."""
        return self._sequence.known + self._depth(way)

    def width(self, way: DraftBranch | None) -> int:
        """How many tokens to guess next on a way."""
        return self._widths[self._depth(way)]

    def offer(self, way: DraftBranch | None, ranked: Sequence[int], q: Floats) -> None:
        """Note what the next candidates on a way were drawn from, those that end the step too."""
        wanted = tuple(token for token in ranked[: self.width(way)] if token >= 0)
        self._offers[way, self._depth(way)] = CandidateOffer(wanted, q)

    def extend(self, way: DraftBranch | None, ranked: Sequence[int]) -> None:
        """The likeliest of ``ranked`` lengthens the way, the others fork off, as many as are
        wanted. What would end the step is not worth a row: the draw after the guesses tells."""
        depth = self._depth(way)
        before = [*self.run.drawn, *self._tokens(way)]
        wanted = [token for token in ranked[: self._widths[depth]] if token >= 0]
        going_on = [token for token in wanted if not self._ends([*before, token])]
        deepest = depth + 1 == len(self._widths)
        for rank, token in enumerate(going_on):
            if rank:
                tip = DraftBranch(way, depth, [token])
                (self._tips if deepest else self._sequence.forks).append(tip)
            elif deepest:
                self._last[way] = token  # nothing follows it, so the draft need not read it
            elif way is None:
                self._sequence.guess(token)
            else:
                way.tokens.append(token)

    def done(self, cache: PrefixCache) -> DraftTree:
        """The guesses; the sequence keeps what was computed of the chain."""
        sequence = self._sequence
        tokens, forks = self._tokens(None), sequence.forks
        cache.prune(forks)
        sequence.forks, sequence.proposed = [], 0
        for way, token in self._last.items():
            (tokens if way is None else way.tokens).append(token)
        return trimmed(tokens, [*forks, *self._tips], self._offers)

    def _depth(self, way: DraftBranch | None) -> int:
        return self._sequence.proposed if way is None else way.depth

    def _tokens(self, way: DraftBranch | None) -> list[int]:
        """All guesses on a way."""
        if way is None:
            return self._sequence.tokens[self._sequence.known : self._sequence.length].tolist()
        return [*self._tokens(way.above)[: way.at], *way.tokens]

    def _ends(self, tokens: Sequence[int]) -> bool:
        """Whether a step would end with the last of these tokens."""
        return tokens[-1] in self._eos or self.run.call.stops.ended(tokens)
