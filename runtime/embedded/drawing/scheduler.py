"""Draws steps: all branches of all searches through one batch of one policy model.

A branch waits, its prefix is prefilled (once for all siblings that share it), and from the last
row's logits each sibling draws its own first token and goes on decoding. When a step ends, what it
computed joins the radix tree, unless it ended the reply. Order, batching and memory decide when a
token is drawn, never which.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from kvpolicy.value import certainty
from runtime.embedded.drafting.speculation import Speculation
from runtime.embedded.drawing.account import Account, charge_pass, sum_of
from runtime.embedded.drawing.batch import Advance, Batch, Forwards, Refusal
from runtime.embedded.drawing.branches import Call, Prefix, Run
from runtime.embedded.drawing.draws import Draw, Taken, draw_for, take
from runtime.embedded.drawing.expansion import SpeculativeExpansion
from runtime.embedded.drawing.intake import must_be_drawable
from runtime.embedded.drawing.steps import Steps
from runtime.embedded.drawing.turns import in_turn
from runtime.embedded.drawing.visits import Visits, ranks
from runtime.embedded.kv.cache import Cache
from runtime.embedded.kv.lane import Lane, Order
from runtime.embedded.kv.namespaces import Namespaces
from runtime.embedded.kv.retention import WORTH, KvPolicy, Worth
from runtime.text import Text
from search.engine import Branch, Hint, KvMoved, Sampling, Step
from search.tree import ROOT, Finish

PREFILL_ROWS = 256


@dataclass(frozen=True, slots=True)
class Drawn:
    """A finished call, and what the KV of its search went through since the last one."""

    call: int
    steps: list[Step]
    tree: str
    moved: KvMoved


class Scheduler:
    """The branches of one policy model: waiting, running, and what searches hold."""

    def __init__(
        self,
        forward: Forwards,
        draw: Draw,
        text: Text,
        *,
        context: int,
        vocab: int,
        kv_tokens: int,
        batch_limit: int,
        flops: Callable[[int, int, int], float],
        kv_policy: KvPolicy = "lru",
        speculation: Speculation | None = None,
        worth: Worth = WORTH,
        speculate: bool = False,
        visits: Visits = "prefix",
    ) -> None:
        """``context``: the longest sequence; ``vocab``: token ids are below it;
        ``flops(tokens, context_sum, logits)``: the cost of a forward; ``speculation``: what drafts
        ahead of the draws, None if nothing does; ``speculate``: idle places are filled with what
        rounds may ask for next; ``visits``: the order in which a round's branches are let in."""
        if batch_limit < 1:
            raise ValueError(f"batch_limit: {batch_limit}; at least 1 is needed")
        self.cache = Cache(kv_tokens, kv_policy, worth)
        self.batch = Batch(
            forward,
            self.cache,
            lanes=batch_limit,
            rows=PREFILL_ROWS,
            give_way=self._give_way,
            starve=self._starve,
        )
        self.accounts: dict[str, Account] = {}
        self.past = Account(0)
        self.retractions = 0
        self._starved: list[int] = []
        self._draw = draw
        self._steps = Steps(text)
        self._context = context
        self._vocab = vocab
        self._visits: Visits = visits
        self._flops = flops
        self.speculation = speculation
        self._waiting: list[Run] = []
        self._running: dict[Lane, Run | Prefix] = {}
        self.expansion = SpeculativeExpansion(
            self.batch, self._running, self.accounts, self._steps, self._start, on=speculate
        )
        self._calls: dict[int, Call] = {}
        self._finished: list[Call] = []
        self._arrivals = 0
        self._namespaces = Namespaces()

    @property
    def busy(self) -> bool:
        """Whether there is anything to draw or to answer."""
        return bool(self._calls or self._finished)

    @property
    def running(self) -> int:
        """Branches in the batch."""
        works = self._running.values()
        return sum(isinstance(work, Run) and not work.early for work in works)

    @property
    def waiting(self) -> int:
        """Branches that wait for memory, their prefix or a place in the batch."""
        return len(self._waiting)

    def expand(
        self,
        call_id: int,
        tree: str,
        branches: Sequence[Branch],
        sampling: Sampling,
        *,
        fresh: bool = False,
    ) -> None:
        """Take on a round. Raises EngineError if a branch can never run.

        ``fresh``: its prefixes do not follow from what was drawn here before.
        """
        rooms = {"context": self._context, "kv_tokens": self.cache.capacity}
        must_be_drawable(branches, sampling, self._vocab, rooms)
        account = self._account(tree)
        self._arrivals += 1
        stops, nothing = self._steps.stops(sampling), [None] * len(branches)
        call = Call(call_id, self._arrivals, tree, sampling, stops, [*nothing])
        self._calls[call_id] = call
        prefixes: dict[tuple[int, ...], Prefix] = {}
        runs = []
        places = ranks(branches, self._visits)
        for index, (branch, place) in enumerate(zip(branches, places, strict=True)):
            prefix = prefixes.get(branch.tokens)
            if prefix is None:
                prefix = self._prefix(tree, account, branch, fresh)
                prefixes[branch.tokens] = prefix
            order = (account.number, call.number, place)
            runs.append(Run(call, index, branch, prefix, order))
        self._begin(tree, runs)
        if not runs:
            self._finished.append(self._calls.pop(call_id))

    def step(self) -> list[Drawn]:
        """One iteration: admit, run one forward pass, draw; the calls that are finished."""
        if self._waiting:
            self.expansion.park()
            self._admit()
        if not self._waiting and self._running:
            begun = [(run, run.prefix.logits) for run in self.expansion.fill()]
            self._draw_next([(run, logits) for run, logits in begun if logits is not None])
        landed = []
        advances = self._advance()
        self._charge(advances)
        for advance in advances:
            if advance.logits is None:
                continue
            work = self._running[advance.lane]
            if isinstance(work, Run):
                beside = [logits for _, logits in advance.beside]
                landed.append((work, torch.cat([advance.logits, *beside])))
            else:
                work.logits = advance.logits.clone()
                self._leave(work)
        self._draw_next(landed)
        if self.speculation:
            self.speculation.drawn()
        finished, self._finished = self._finished, []
        return [self._drawn(call) for call in finished]

    def check(self) -> None:
        """Raise AssertionError unless the books of all caches are right."""
        self.cache.check()
        if self.speculation:
            self.speculation.drafter.cache.check()

    def starved(self) -> list[int]:
        """The calls that got no answer since the last look, for want of KV."""
        starved, self._starved = self._starved, []
        return starved

    def hint(self, tree: str, hint: Hint) -> None:
        """Free what the search has pruned."""
        account = self.accounts.get(tree)
        if account is None:
            return
        self.expansion.bury(tree, hint.dead)
        self.cache.retention.hint(tree, hint)
        if account.bury(hint.dead):
            unfinished = [run.tokens() for run in self._waiting if run.call.tree == tree]
            wanted = [*account.alive(), *unfinished]
            self.cache.retain(tree, wanted)
            if self.speculation:
                self.speculation.drafter.cache.retain(tree, wanted)

    def mean_logprob(
        self, tree: str, prompt: Sequence[int], steps: Sequence[Sequence[int]]
    ) -> float:
        """Mean log-probability a token of steps drawn here. Raises KeyError for others."""
        path = self._namespaces.mark(tree, np.asarray(prompt, dtype=np.int64))
        return self._steps.mean_logprob(tree, path, steps)

    def abort(self, tree: str) -> list[int]:
        """Stop a search's branches; the ids of the calls that get no answer."""
        self.expansion.end(tree)
        self._waiting = [run for run in self._waiting if run.call.tree != tree]
        for work in [work for lane, work in self._running.items() if lane.tree == tree]:
            self._leave(work, publish=False)
        stopped = [call.id for call in self._calls.values() if call.tree == tree]
        for call_id in stopped:
            del self._calls[call_id]
        return stopped

    def release(self, tree: str) -> Account | None:
        """Let go of a search that runs nothing; what it cost, None if it was never here."""
        self.expansion.end(tree)
        account = self.accounts.pop(tree, None)
        self._steps.forget(tree)
        if account is not None:
            account.peak = self.cache.peaks.get(tree, 0)
            self.cache.release(tree, account.prompt)
            if self.speculation:
                account.flops += self.speculation.drafter.release(tree, account.prompt)
            self.past.charge(account)
        return account

    def totals(self) -> Account:
        """The costs of all searches, past and present."""
        return sum_of((self.past, *self.accounts.values()))

    def _account(self, tree: str) -> Account:
        if tree not in self.accounts:
            self._arrivals += 1
            self.accounts[tree] = Account(self._arrivals)
        return self.accounts[tree]

    def _prefix(self, tree: str, account: Account, branch: Branch, fresh: bool) -> Prefix:
        tokens = self._namespaces.mark(tree, np.asarray(branch.tokens, dtype=np.int64))
        known = account.prompt is not None and not fresh
        if account.prompt is None or branch.parent == ROOT:
            account.prompt = tokens
        account.name(branch.parent, tokens)
        self.cache.retention.begin(tree, tokens)
        self.cache.retention.close(tree, branch.parent, ROOT, tokens)
        return self.expansion.prefix(tree, branch.parent, tokens) or Prefix(tokens, known)

    def _begin(self, tree: str, runs: Sequence[Run]) -> None:
        """Let branches wait with what was drawn for them early; end those whose step that is."""
        finishes = [self.expansion.take(run) for run in runs]
        self.expansion.settle(tree)
        for run, finish in zip(runs, finishes, strict=True):
            if finish is None:
                insort(self._waiting, run, key=_order)
            else:
                self._end(run, finish)

    def _admit(self) -> None:
        """Let waiting branches in, the trees in turn, as far as places and memory go."""
        admitted, held_back = [], []
        places = Counter(lane.tree for lane in self._running)
        waiting = in_turn(self._waiting, lambda run: run.call.tree, places)
        for at, run in enumerate(waiting):
            ready = run.prefix.logits is not None
            refusal = self._start(run)
            if refusal is Refusal.STARVED and self.expansion.give_up():
                refusal = self._start(run)
            (held_back if refusal or not ready else admitted).append(run)
            if refusal and refusal is not Refusal.SHARED:
                held_back += waiting[at + 1 :]
                break
        self._waiting = sorted(held_back, key=_order)
        self._draw_next([(r, r.prefix.logits) for r in admitted if not r.drawn])

    def _advance(self) -> list[Advance]:
        """One forward pass, over the draft's proposals too where there is one."""
        if self.speculation is None:
            return self.batch.advance()
        runs = [work for work in self._running.values() if isinstance(work, Run)]
        asked = sorted((run for run in runs if not run.early), key=_order)
        return self.speculation.advance(self.batch, asked)

    def _start(self, run: Run) -> Refusal | None:
        """Give a branch a lane, or have its prefix computed first."""
        return self._start_prefix(run) if run.prefix.logits is None else self._start_run(run)

    def _start_prefix(self, run: Run) -> Refusal | None:
        """Have the prefix of a branch computed, unless it is under way."""
        prefix, tree = run.prefix, run.call.tree
        if prefix.lane is not None:
            return None
        size = len(prefix.tokens)
        lane = self.batch.enter(
            tree, run.order, prefix.tokens, size=size, upto=size - 1, spare=run.early
        )
        if isinstance(lane, Refusal):
            return lane
        prefix.lane = lane
        self._running[lane] = prefix
        self.accounts[tree].cached_tokens += lane.computed
        if prefix.known:
            self.accounts[tree].rehydrate(lane.missing - 1)
        return None

    def _start_run(self, run: Run) -> Refusal | None:
        """Give a branch whose prefix's logits are known a lane of its own."""
        prefix, tree, tokens = run.prefix, run.call.tree, run.tokens()
        pending = 1 if run.drawn else 0
        size = len(prefix.tokens) + run.branch.limit
        upto = len(tokens) - pending
        lane = self.batch.enter(tree, run.order, tokens, size=size, upto=upto, spare=run.early)
        if isinstance(lane, Refusal):
            return lane
        run.lane = lane
        self._running[lane] = run
        self.accounts[tree].rehydrate(lane.missing - pending)
        if prefix.used and not run.drawn:
            self.accounts[tree].cached_tokens += len(prefix.tokens)
        prefix.used = True
        return None

    def _leave(self, work: Run | Prefix, *, publish: bool = True) -> None:
        """Take a lane out of the batch; what it computed is cached unless nothing can follow."""
        assert work.lane is not None, "work without a lane has left already"
        if self.speculation and isinstance(work, Run):
            self.speculation.end(work, publish=publish)
        del self._running[work.lane]
        if publish:
            self.batch.publish(work.lane)
        else:
            self.batch.drop(work.lane)
        work.lane = None

    def _give_way(self, lane: Lane) -> None:
        """A lane lost its place to older ones: its branch waits again, with what it has drawn."""
        work = self._running.pop(lane)
        work.lane = None
        self.retractions += 1
        if isinstance(work, Run):
            if self.speculation:
                self.speculation.end(work, publish=True)
            self.cache.retention.draws(work.call.tree, work.branch.node, work.tokens())
            insort(self._waiting, work, key=_order)

    def _starve(self) -> None:
        """Nothing fits beside what searches hold: the youngest that draws now loses all it has."""
        assert self.cache.retention.keeps_held, "a lane alone does not fit; it was to be refused"
        numbers = {call.tree: self.accounts[call.tree].number for call in self._calls.values()}
        tree = max(numbers, key=lambda name: numbers[name])
        self._starved += self.abort(tree)
        self.cache.retain(tree, ())

    def _drawn(self, call: Call) -> Drawn:
        tree, cache = call.tree, self.cache
        moved = KvMoved(cache.tokens_of(tree), cache.capacity, cache.radix.moved(tree))
        return Drawn(call.id, [step for step in call.steps if step is not None], tree, moved)

    def _draw_next(self, rows: Sequence[tuple[Run, torch.Tensor]]) -> None:
        """Draw each run's next tokens from its logits: (1 + guesses, vocab), in their order."""
        for run, logits, draws in draw_for(self._draw, rows):
            self._take(run, take(run, logits, draws, self._steps.finish))

    def _take(self, run: Run, taken: Taken) -> None:
        """Book what a run was given; end the step if it is complete."""
        self.cache.prune(taken.guesses.forks)
        self.accounts[run.call.tree].take(taken)
        if self.speculation:
            self.speculation.pace.checked(taken.tested, taken.accepted)
        if taken.finish is not None:
            self._close(run, taken.finish)

    def _close(self, run: Run, finish: Finish) -> None:
        """A branch has drawn its step's last token."""
        if run.early:
            self.expansion.ended(run, finish)
        else:
            self._leave(run, publish=finish is not Finish.END)
            self._end(run, finish)

    def _end(self, run: Run, finish: Finish) -> None:
        """File a finished step, and its call if it was the last."""
        call, branch, path, attention = run.call, run.branch, run.tokens(), ()
        if finish is not Finish.END:
            self.accounts[call.tree].name(branch.node, path)
            self.expansion.offer(run, path)
        retention = self.cache.retention
        if finish is Finish.END or branch.node < ROOT:  # a verdict is nobody's parent
            retention.drop(call.tree, branch.node)
        else:
            sure = certainty(run.entropy, self._vocab)
            attention = retention.close(call.tree, branch.node, branch.parent, path, sure)
        call.steps[run.index] = self._steps.step(run, finish, attention)
        if call.done:
            del self._calls[call.id]
            self._finished.append(call)

    def _charge(self, advances: Sequence[Advance]) -> None:
        """Book a pass: a branch's last row and its guesses decode, the others are prefill."""
        charge_pass(self.accounts, advances, self._flops)
        for done in advances:
            if done.logits is not None and isinstance(self._running[done.lane], Run):
                account = self.accounts[done.lane.tree]
                account.prefilled_tokens -= len(done.logits)
                account.target_passes += 1


def _order(run: Run) -> Order:
    return run.order
