"""Steps drawn before a round asks for them, in places that nothing real wants.

While stragglers decode, beams that have ended their step go on with their next children, in order
of potential. A child says the same whenever it is drawn, so the round that asks for it takes it
over as it is: this is early execution, and nothing of it is ever truncated or drawn again. Real
work takes its places back before the next forward pass, and its memory before anything else goes.
(FlashTTS, sections 4.1.1 and 4.1.2.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from heapq import heappop, heappush

import numpy as np

from runtime.embedded.batch import Batch
from runtime.embedded.queues import SequenceQueues
from runtime.embedded.sequence import (
    BranchSequence,
    ExpandCall,
    SharedPrefix,
    StepBuilder,
    TokenSequence,
)
from runtime.embedded.tracked_search import TrackedSearch
from search.engine import Ahead, Trajectory
from search.tree import Finish

IDLE_PLACES = 16
"""Rows up to which a pass costs little more than with one."""
PASS_ROWS = 16
"""Rows that add as much to a pass as it costs by itself."""
TRIAL_TOKENS = 64
"""Early tokens that a search may waste before they must have saved it passes."""
SHARE = 0.25
"""Of the KV store, the most that speculated steps may take, all searches together."""

_LAST = 1 << 62


@dataclass(slots=True, eq=False)
class ExtendedStep:
    """A step that has ended, and its children begun early, by child index.

    ``run`` is the branch whose step it was.
    """

    run: BranchSequence
    ahead: Ahead
    prefix: SharedPrefix
    children: dict[int, BranchSequence] = field(default_factory=dict)


Place = tuple[int, int, int]
"""Where a child stands in its search's queue: least first. Its potential, negated, less those of
its siblings that went before; the beam's arrival; the child's index."""


class BeamExtension:
    """The beams of all searches that may run ahead, and what has been drawn of their children."""

    def __init__(
        self,
        batch: Batch,
        queues: SequenceQueues,
        accounts: Mapping[str, TrackedSearch],
        steps: StepBuilder,
        *,
        on: bool,
    ) -> None:
        self._batch = batch
        self._queues = queues
        self._accounts = accounts
        self._steps = steps
        self._on = on
        self._beams: dict[str, dict[int, ExtendedStep]] = {}
        self._children: dict[str, list[tuple[Place, ExtendedStep]]] = {}
        self._paused: dict[str, list[BranchSequence]] = {}
        self._finished: dict[BranchSequence, Finish] = {}
        self._arrivals = 0

    def enqueue(self, run: BranchSequence, path: np.ndarray) -> None:
        """A branch's step has ended at ``path``: its children may run ahead."""
        ahead, tree = run.branch.ahead, run.tree
        if not self._on or ahead is None or not self._worthwhile(tree):
            return
        if run.branch.early_limit(len(run.drawn), run.call.sampling.max_step_tokens) < 1:
            return
        beams = self._beams.setdefault(tree, {})
        if run.branch.node in beams:  # a node is one step; what was begun below it is kept
            return
        beam = beams[run.branch.node] = ExtendedStep(
            run, ahead, SharedPrefix(tree, path, visited=True)
        )
        self._arrivals += 1
        heappush(self._children.setdefault(tree, []), ((-ahead.children, self._arrivals, 0), beam))

    def fill_idle_places(self) -> list[BranchSequence]:
        """Give idle places to the likeliest children, equally many to each search that has some;
        those to draw from their prefix's logits now."""
        begun: list[BranchSequence] = []
        wanting = [tree for tree in self.wanting() if self._may(tree)]
        idle = min(self._batch.places, IDLE_PLACES - len(self._batch.sequences))
        places = Counter(sequence.tree for sequence in self._batch.sequences if sequence.spare)
        while wanting:
            tree = min(wanting, key=lambda t: (places[t], self._accounts[t].number))
            if idle <= 0:
                richest = max(places, key=lambda t: places[t], default=tree)
                if places[richest] - places[tree] < 2 or not self._take_back(richest):
                    break
                places[richest] -= 1
            run = self._next(tree)
            if run is None:
                wanting.remove(tree)
                continue
            places[tree] += 1
            idle -= 1
            if run.live and not run.drawn:
                begun.append(run)
        return begun

    def wanting(self) -> set[str]:
        """The searches that have children left to run ahead."""
        parked = {tree for tree, runs in self._paused.items() if runs}
        return parked | {tree for tree, queue in self._children.items() if queue}

    def pause_all(self) -> None:
        """Real work waits: take everything early out of the batch. It keeps its slots."""
        for sequence in [sequence for sequence in self._batch.sequences if sequence.spare]:
            self._pause(sequence)

    def prefix(self, tree: str, node: int, tokens: np.ndarray) -> SharedPrefix | None:
        """The prefix that ends with a node's step, if its logits are known."""
        beam = self._beams.get(tree, {}).get(node)
        if beam is None or beam.prefix.logits is None:
            return None
        return beam.prefix if np.array_equal(beam.prefix.tokens, tokens) else None

    def claim(self, run: BranchSequence) -> Finish | None:
        """A round asks for a branch: it gets what was drawn of it early, and how its step ended if
        it has. What was computed is cached, since something may follow now."""
        beam = self._beams.get(run.tree, {}).get(run.branch.parent)
        early = None if beam is None else beam.children.get(run.branch.child)
        if beam is None or early is None or not _same(early, run):
            return None
        del beam.children[run.branch.child]
        run.drawn, run.logprob, run.entropy = early.drawn, early.logprob, early.entropy
        run.taken = len(run.drawn)
        finish = self._finished.pop(early, None)
        self._drop(early, publish=finish is not Finish.END)
        self._accounts[run.tree].counters.speculated_used += len(run.drawn)
        return finish

    def start_round(self, tree: str) -> None:
        """A round has begun: what it did not ask for runs no further, and what has not begun will
        not begin."""
        self._children.pop(tree, None)
        for sequence in [
            sequence
            for sequence in self._batch.sequences
            if sequence.spare and sequence.tree == tree
        ]:
            self._pause(sequence)
        self._paused.pop(tree, None)
        beams = self._beams.get(tree, {})
        for node in [node for node, beam in beams.items() if not beam.children]:
            del beams[node]

    def finished_next_steps(
        self, tree: str, trajectories: Sequence[Trajectory]
    ) -> dict[int, Trajectory]:
        """Trajectories with their likeliest next step, by node, where it is drawn whole."""
        found = {t.node: self._onward(tree, t) for t in trajectories}
        return {node: onward for node, onward in found.items() if onward is not None}

    def finish(self, run: BranchSequence, finish: Finish) -> None:
        """An early step is whole: it waits to be asked for, its KV with it if more may follow."""
        self._finished[run] = finish
        self._batch.pause(run)
        if finish is Finish.END:
            self._drop(run)

    def mark_dead(self, tree: str, nodes: Sequence[int]) -> None:
        """These nodes get no children any more."""
        beams = self._beams.get(tree, {})
        for node in nodes:
            if node in beams:
                self._discard(tree, beams.pop(node))

    def remove_tree(self, tree: str) -> None:
        """A search is over, or stops."""
        self.start_round(tree)
        for beam in self._beams.pop(tree, {}).values():
            self._discard(tree, beam)

    def sequences(self, tree: str | None = None) -> list[BranchSequence]:
        """What has been begun early and not been asked for, of one search or of all."""
        kept = self._beams.values() if tree is None else [self._beams.get(tree, {})]
        return [run for beams in kept for beam in beams.values() for run in beam.children.values()]

    def _onward(self, tree: str, trajectory: Trajectory) -> Trajectory | None:
        beam = self._beams.get(tree, {}).get(trajectory.node)
        children = {} if beam is None else beam.children
        for child in sorted(children):
            run = children[child]
            if (finish := self._finished.get(run)) is not None:
                step = self._steps.step(run, finish)
                steps, texts = (*trajectory.steps, step.tokens), (*trajectory.texts, step.text)
                return Trajectory(trajectory.node, steps, texts, trajectory.seed)
        return None

    def _take_back(self, tree: str) -> bool:
        """Park a search's least likely early run; False if it has none in the batch."""
        for sequence in reversed(self._batch.sequences):
            if sequence.spare and sequence.tree == tree and isinstance(sequence, BranchSequence):
                self._pause(sequence)
                return True
        return False

    def _pause(self, sequence: TokenSequence) -> None:
        if isinstance(sequence, BranchSequence):
            self._batch.pause(sequence)
            self._paused.setdefault(sequence.tree, []).append(sequence)
        else:
            self._batch.drop(sequence)

    def _may(self, tree: str) -> bool:
        """Whether a search may take more: within its part of the memory, and while the passes that
        it saved so are worth the rows that it wasted."""
        if not self._worthwhile(tree):
            return False
        held = sum(len(run.private) for run in self.sequences(tree) if run.live)
        return held < SHARE * self._batch.cache.capacity / len(self._beams)

    def _worthwhile(self, tree: str) -> bool:
        account = self._accounts.get(tree)
        return account is not None and pays(
            account.passes_saved, account.counters.speculated_wasted
        )

    def _next(self, tree: str) -> BranchSequence | None:
        """Run a search's likeliest early child that can run; None if none can."""
        parked = self._paused.get(tree)
        while parked:
            run = parked.pop()
            if run.live and run not in self._finished:
                self._batch.resume(run)
                return run
        queue, passed, found = self._children.get(tree, []), [], None
        while queue and found is None:
            place, beam = heappop(queue)
            if self._beams.get(tree, {}).get(beam.run.branch.node) is not beam:  # buried since
                continue
            if beam.prefix.live:
                passed.append((place, beam))
                continue
            run = self._child(beam, place)
            ready = beam.prefix.logits is not None
            if self._queues.start(run) is not None:
                break
            found = run
            if not ready:
                passed.append((place, beam))
                continue
            rest, arrival, child = place
            beam.children[child] = run
            if child + 1 < beam.ahead.children:
                passed.append(((rest + 1, arrival, child + 1), beam))
        for entry in passed:
            heappush(queue, entry)
        return found

    @staticmethod
    def _child(beam: ExtendedStep, place: Place) -> BranchSequence:
        child, run = place[2], beam.run
        branch = run.branch.early_child(child, run.drawn, run.call.sampling.max_step_tokens)
        call = ExpandCall(0, 0, run.tree, run.call.sampling, run.call.stops, [])
        order = (_LAST + place[0], place[1], child)
        return BranchSequence(call, 0, branch, beam.prefix, order, spare=True)

    def _discard(self, tree: str, beam: ExtendedStep) -> None:
        for run in beam.children.values():
            self._finished.pop(run, None)
            self._drop(run)
            self._accounts[tree].counters.speculated_wasted += len(run.drawn)
        if beam.prefix.live and beam.prefix.spare:
            self._batch.drop(beam.prefix)
        beam.children.clear()

    def _drop(self, run: BranchSequence, *, publish: bool = False) -> None:
        """An early run's sequence ends, wherever it is; what was drawn stays."""
        if run.live:
            (self._batch.publish if publish else self._batch.drop)(run)


def pays(passes: int, rows: int) -> bool:
    """Whether ``passes`` saved are worth as much as ``rows`` wasted; True until that is known."""
    return rows < TRIAL_TOKENS or passes * PASS_ROWS >= rows


def _same(early: BranchSequence, run: BranchSequence) -> bool:
    """Whether what was drawn early is what the branch asks for."""
    return early.branch.draws_as(run.branch) and early.call.sampling == run.call.sampling
