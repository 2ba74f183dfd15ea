"""Decode steps before a round asks for them, in batch places that no round uses.

While stragglers decode, beams that have ended their step go on with their next children, in order
of potential. A child is the same whenever it is decoded, so the round that asks for it takes it
over as it is: nothing of it is ever truncated or decoded again. Rounds take these places back
before the next forward pass, and the extensions' memory before any other memory.
(FlashTTS, sections 4.1.1 and 4.1.2.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from runtime.accounting import TrackedSearch
from runtime.embedded.batch import Batch
from runtime.embedded.queues import SequenceQueues
from runtime.embedded.sequence import (
    BranchSequence,
    ExpandCall,
    SharedPrefix,
    StepBuilder,
    TokenSequence,
)
from search.engine import Ahead, Trajectory
from search.tree import Finish

IDLE_PLACES = 16
"""Rows up to which a pass costs little more than a pass with one row."""
PASS_ROWS = 16
"""Extra rows that cost as much as one more pass."""
TRIAL_TOKENS = 64
"""Extended tokens that a search may waste before extensions must have saved it passes."""
SHARE = 0.25
"""Largest share of the KV store that extensions of all searches together may take."""

_LAST = 1 << 62


@dataclass(slots=True, eq=False)
class ExtendedStep:
    """A step that has ended, and those of its children that were begun early, by child index.

    ``seq``: the branch whose step it was.
    """

    seq: BranchSequence
    ahead: Ahead
    prefix: SharedPrefix
    children: dict[int, BranchSequence] = field(default_factory=dict)


Place = tuple[int, int, int]
"""A child's key in its search's queue, the lowest first: minus its potential, which is the beam's
children from this one on; the beam's arrival number; the child's index."""


class BeamExtension:
    """The beams of all searches that may be extended, and their children decoded so far."""

    def __init__(
        self,
        batch: Batch,
        queues: SequenceQueues,
        searches: Mapping[str, TrackedSearch],
        steps: StepBuilder,
        *,
        on: bool,
    ) -> None:
        self._batch = batch
        self._queues = queues
        self._searches = searches
        self._steps = steps
        self._on = on
        self._beams: dict[str, dict[int, ExtendedStep]] = {}
        self._children: dict[str, list[tuple[Place, ExtendedStep]]] = {}
        self._paused: dict[str, list[BranchSequence]] = {}
        self._finished: dict[BranchSequence, Finish] = {}
        self._arrivals = 0

    def enqueue(self, seq: BranchSequence, path: np.ndarray) -> None:
        """Queue the children of a branch whose step ended ``path``, if they may be begun early."""
        ahead, tree = seq.branch.ahead, seq.tree
        if not self._on or ahead is None or not self._worthwhile(tree):
            return
        if seq.branch.early_limit(len(seq.output), seq.call.sampling.max_step_tokens) < 1:
            return
        beams = self._beams.setdefault(tree, {})
        if seq.branch.node in beams:  # a node is one step; keep what was begun below it
            return
        beam = beams[seq.branch.node] = ExtendedStep(
            seq, ahead, SharedPrefix(tree, path, visited=True)
        )
        self._arrivals += 1
        heappush(self._children.setdefault(tree, []), ((-ahead.children, self._arrivals, 0), beam))

    def fill_idle_places(self) -> list[BranchSequence]:
        """Give idle places to the likeliest children, equally many to each search that has some.
        Returns those that have a sequence now, without those whose prefix is computed first."""
        ready: list[BranchSequence] = []
        trees = [tree for tree in self.wanting() if self._has_budget(tree)]
        idle = min(self._batch.places, IDLE_PLACES - len(self._batch.sequences))
        places = Counter(
            sequence.tree for sequence in self._batch.sequences if sequence.preemptible
        )
        while trees:
            tree = min(trees, key=lambda t: (places[t], self._searches[t].number))
            if idle <= 0:
                richest = max(places, key=lambda t: places[t], default=tree)
                if places[richest] - places[tree] < 2 or not self._pause_last(richest):
                    break
                places[richest] -= 1
            seq = self._start_next(tree)
            if seq is None:
                trees.remove(tree)
                continue
            places[tree] += 1
            idle -= 1
            if seq.live:
                ready.append(seq)
        return ready

    def wanting(self) -> set[str]:
        """The searches that have children to decode."""
        paused = {tree for tree, seqs in self._paused.items() if seqs}
        return paused | {tree for tree, queue in self._children.items() if queue}

    def pause_all(self, tree: str | None = None) -> None:
        """Take all extensions, or one search's, out of the batch; branches keep their slots."""
        running = [sequence for sequence in self._batch.sequences if sequence.preemptible]
        for sequence in [sequence for sequence in running if tree in (None, sequence.tree)]:
            self._pause(sequence)

    def prefix(self, tree: str, node: int, tokens: np.ndarray) -> SharedPrefix | None:
        """The prefix that ends with a node's step, if beam extension has computed its logits."""
        beam = self._beams.get(tree, {}).get(node)
        if beam is None or beam.prefix.logits is None:
            return None
        return beam.prefix if np.array_equal(beam.prefix.tokens, tokens) else None

    def claim(self, seq: BranchSequence) -> Finish | None:
        """Give a branch that a round asks for what was decoded of it early; why its step ended,
        None if it has not. What was computed is cached, because something may follow now."""
        beam = self._beams.get(seq.tree, {}).get(seq.branch.parent)
        child = None if beam is None else beam.children.get(seq.branch.child)
        if beam is None or child is None or not _matches(child, seq):
            return None
        del beam.children[seq.branch.child]
        seq.output, seq.logprob, seq.entropy = child.output, child.logprob, child.entropy
        seq.logprobs = child.logprobs
        seq.extended = len(seq.output)
        finish = self._finished.pop(child, None)
        self._drop(child, publish=finish is not Finish.END)
        self._searches[seq.tree].counters.speculated_used += len(seq.output)
        return finish

    def start_round(self, tree: str) -> None:
        """Stop extending a search whose round has begun: children that it did not claim run no
        further, and no others begin."""
        self._children.pop(tree, None)
        self.pause_all(tree)
        self._paused.pop(tree, None)
        beams = self._beams.get(tree, {})
        for node in [node for node, beam in beams.items() if not beam.children]:
            del beams[node]

    def finished_next_steps(
        self, tree: str, trajectories: Sequence[Trajectory]
    ) -> dict[int, Trajectory]:
        """Trajectories extended by their likeliest next step, by node, where that is complete."""
        extended = {t.node: self._with_next_step(tree, t) for t in trajectories}
        return {node: t for node, t in extended.items() if t is not None}

    def finish(self, seq: BranchSequence, finish: Finish) -> None:
        """Keep an extension whose step is complete for a round, with its KV if more may follow."""
        self._finished[seq] = finish
        self._batch.pause(seq)
        if finish is Finish.END:
            self._drop(seq)

    def mark_dead(self, tree: str, nodes: Sequence[int]) -> None:
        """Discard what was decoded below nodes that get no more children."""
        beams = self._beams.get(tree, {})
        for node in nodes:
            if node in beams:
                self._discard(tree, beams.pop(node))

    def remove_tree(self, tree: str) -> None:
        """Discard everything of a search that is over or was stopped."""
        self.start_round(tree)
        for beam in self._beams.pop(tree, {}).values():
            self._discard(tree, beam)

    def sequences(self, tree: str | None = None) -> list[BranchSequence]:
        """The children begun early that no round has asked for, of one search or of all."""
        trees = self._beams.values() if tree is None else [self._beams.get(tree, {})]
        return [seq for beams in trees for beam in beams.values() for seq in beam.children.values()]

    def _with_next_step(self, tree: str, trajectory: Trajectory) -> Trajectory | None:
        beam = self._beams.get(tree, {}).get(trajectory.node)
        children = {} if beam is None else beam.children
        for child in sorted(children):
            seq = children[child]
            if (finish := self._finished.get(seq)) is not None:
                step = self._steps.step(seq, finish)
                steps, texts = (*trajectory.steps, step.tokens), (*trajectory.texts, step.text)
                return Trajectory(trajectory.node, steps, texts, trajectory.seed)
        return None

    def _pause_last(self, tree: str) -> bool:
        """Pause a search's least likely extension; False if it has none in the batch."""
        for seq in reversed(self._batch.sequences):
            if seq.preemptible and seq.tree == tree and isinstance(seq, BranchSequence):
                self._pause(seq)
                return True
        return False

    def _pause(self, sequence: TokenSequence) -> None:
        if isinstance(sequence, BranchSequence):
            self._batch.pause(sequence)
            self._paused.setdefault(sequence.tree, []).append(sequence)
        else:
            self._batch.drop(sequence)

    def _has_budget(self, tree: str) -> bool:
        """Whether a search may extend more: it is within its part of the memory, and the passes
        that extensions saved it are worth the rows that they wasted."""
        if not self._worthwhile(tree):
            return False
        tokens = sum(len(seq.private) for seq in self.sequences(tree) if seq.live)
        return tokens < SHARE * self._batch.cache.capacity / len(self._beams)

    def _worthwhile(self, tree: str) -> bool:
        search = self._searches.get(tree)
        return search is not None and pays(search.passes_saved, search.counters.speculated_wasted)

    def _start_next(self, tree: str) -> BranchSequence | None:
        """Run a search's likeliest child that can run, or its prefix first; None if none can."""
        paused = self._paused.get(tree)
        while paused:
            seq = paused.pop()
            if seq.live and seq not in self._finished:
                self._batch.resume(seq)
                return seq
        queue, skipped, started = self._children.get(tree, []), [], None
        while queue and started is None:
            place, beam = heappop(queue)
            if self._beams.get(tree, {}).get(beam.seq.branch.node) is not beam:  # it has died
                continue
            if beam.prefix.live:
                skipped.append((place, beam))
                continue
            seq = self._child(beam, place)
            ready = beam.prefix.logits is not None
            if self._queues.start(seq) is not None:
                break
            started = seq
            if not ready:
                skipped.append((place, beam))
                continue
            potential, arrival, child = place
            beam.children[child] = seq
            if child + 1 < beam.ahead.children:
                skipped.append(((potential + 1, arrival, child + 1), beam))
        for entry in skipped:
            heappush(queue, entry)
        return started

    @staticmethod
    def _child(beam: ExtendedStep, place: Place) -> BranchSequence:
        child, seq = place[2], beam.seq
        branch = seq.branch.early_child(child, seq.output, seq.call.sampling.max_step_tokens)
        parent = seq.call
        call = ExpandCall(0, 0, seq.tree, parent.sampling, parent.stops, [], parent.processors)
        order = (_LAST + place[0], place[1], child)
        return BranchSequence(call, 0, branch, beam.prefix, order, preemptible=True)

    def _discard(self, tree: str, beam: ExtendedStep) -> None:
        for seq in beam.children.values():
            self._finished.pop(seq, None)
            self._drop(seq)
            self._searches[tree].counters.speculated_wasted += len(seq.output)
        if beam.prefix.live and beam.prefix.preemptible:
            self._batch.drop(beam.prefix)
        beam.children.clear()

    def _drop(self, seq: BranchSequence, *, publish: bool = False) -> None:
        """End an extension's sequence if it is live; its output tokens stay."""
        if seq.live:
            (self._batch.publish if publish else self._batch.drop)(seq)


def pays(passes: int, rows: int) -> bool:
    """Whether ``passes`` saved are worth ``rows`` wasted; True below TRIAL_TOKENS rows."""
    return rows < TRIAL_TOKENS or passes * PASS_ROWS >= rows


def _matches(child: BranchSequence, seq: BranchSequence) -> bool:
    """Whether an extension decodes the same step as the branch."""
    return child.branch.draws_as(seq.branch) and child.call.sampling == seq.call.sampling
