"""Score trajectories with the reward model: prefill the new tokens, read one reward at the end.

Rewards are stored by token path while their search lives, and never computed twice.
"""

from __future__ import annotations

from bisect import insort
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from runtime.accounting import TrackedSearch, total_of
from runtime.embedded.batch import Advance, Batch, Forwards, Refusal, charge_pass
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.prefix_cache import PrefixCache
from runtime.embedded.queues import fair_order
from runtime.embedded.sequence import DraftTree, Order, TokenSequence, order_of
from runtime.embedded.validation import CallErrors, must_be_ids, must_fit
from runtime.reward_format import Spelt, reward_format
from runtime.reward_reader import Reader, overhead_of
from runtime.text import Text
from search.counters import Counters
from search.engine import Hint, Trajectory


@dataclass(slots=True, eq=False)
class ScoreCall:
    """Trajectories to score together: their paths in the call's order, and the unread ones."""

    id: int
    tree: str
    paths: list[bytes]
    unread: set[bytes] = field(default_factory=set)


class ScoreSequence(TokenSequence):
    """The sequence of a ``path``, int64 ids, whose reward is read at its end.

    ``ahead``: the path continued by a step that nobody has asked to score yet; if it fits, both
    ends are read in one pass.
    """

    def __init__(self, tree: str, path: np.ndarray, order: Order) -> None:
        super().__init__(tree, order, len(path))
        self.path = path
        self.ahead: np.ndarray | None = None


class RewardScorer:
    """Scores the trajectories of all searches with one reward model."""

    def __init__(
        self, options: EngineOptions, forward: Forwards, config: ModelConfig, reader: Reader
    ) -> None:
        """``config``: the reward model's."""
        self.cache = PrefixCache(options.prm_kv_tokens)
        self.batch = Batch(forward, self.cache, limit=options.batch_limit)
        self.searches: dict[str, TrackedSearch] = {}
        self.past = Counters()
        self._reader = reader
        self._context, self._vocab, self._flops = config.context, config.vocab, config.flops
        if reward_format(options.reward_format).reads_hidden:
            self._flops = replace(config.flops, logits=0)
        self._waiting: list[ScoreSequence] = []
        self._calls: dict[int, ScoreCall] = {}
        self._finished: list[ScoreCall] = []
        self._rewards: dict[str, dict[bytes, float]] = {}
        self._pieces: dict[str, Spelt] = {}
        self._ahead: dict[str, dict[int, np.ndarray]] = {}
        self._arrivals = 0
        self.errors = CallErrors()
        """Errors of searches whose calls get no answer; the caller must abort and release these."""

    @property
    def busy(self) -> bool:
        """Whether there is anything to score or to answer."""
        return bool(self._calls or self._finished)

    @property
    def overhead(self) -> tuple[int, int]:
        """Tokens of a path beyond the policy's: once, and for each step."""
        return overhead_of(self._reader.paths)

    def score(
        self,
        call_id: int,
        tree: str,
        prompt: Sequence[int],
        question: str,
        trajectories: Sequence[Trajectory],
        ahead: Mapping[int, Trajectory] | None = None,
    ) -> None:
        """Begin to score trajectories. Raises EngineError if one can never be read.

        ``ahead``: by node, the node's trajectory continued by one step, whose reward is stored for
        a later call.
        """
        pieces: Spelt = self._pieces.get(tree, {})
        paths = [
            must_be_ids("steps", self._reader.paths.path(prompt, question, t, pieces), self._vocab)
            for t in trajectories
        ]
        for path in paths:
            self._must_fit(path)
        opening = np.asarray(self._reader.paths.opening(prompt, question, pieces), dtype=np.int64)
        search = self._search_of(tree, opening)
        self._pieces[tree] = pieces
        rewards = self._rewards[tree]
        ahead_paths = {
            node: np.asarray(self._reader.paths.path(prompt, question, t, pieces), dtype=np.int64)
            for node, t in (ahead or {}).items()
        }
        call = ScoreCall(call_id, tree, [path.tobytes() for path in paths])
        self._arrivals += 1
        for index, (path, key) in enumerate(zip(paths, call.paths, strict=True)):
            node = trajectories[index].node
            search.name(node, path)
            if key in rewards or key in call.unread:
                continue
            call.unread.add(key)
            reading = ScoreSequence(tree, path, (search.number, self._arrivals, index))
            if node in ahead_paths:
                self._look_ahead(reading, node, ahead_paths[node])
            insort(self._waiting, reading, key=order_of)
        self._calls[call_id] = call
        self._settle(call)

    def step(self) -> list[tuple[int, list[float]]]:
        """Run one iteration: admit, run one forward pass, read rewards. Returns the finished calls,
        each with its unrounded rewards in [0, 1]."""
        self._admit()
        for sequence in self.batch.schedule():
            assert isinstance(sequence, ScoreSequence), (
                "a path alone does not fit; it was to be refused"
            )
            self._requeue(sequence)
        advances = self.batch.run()
        charge_pass(self.searches, advances, self._flops)
        for advance in advances:
            self.searches[advance.sequence.tree].counters.prm_tokens += advance.rows
            if advance.logits is not None:
                with self.errors.at(advance.sequence.tree):
                    self._read(advance)
        for sequence in [sequence for sequence in self.batch.sequences if not sequence.missing]:
            self.batch.publish(sequence)
        finished = [call for call in self._finished if call.tree not in self.errors]
        self._finished = [call for call in self._finished if call.tree in self.errors]
        return [(c.id, [self._rewards[c.tree][key] for key in c.paths]) for c in finished]

    def hint(self, tree: str, hint: Hint) -> None:
        """Free the KV of what a search has pruned."""
        search = self.searches.get(tree)
        if search is None:
            return
        ahead = self._ahead.get(tree, {})
        for node in hint.dead:
            ahead.pop(node, None)
        if search.mark_dead(hint.dead):
            self.cache.retain(tree, [*search.alive(), *ahead.values()])

    def abort(self, tree: str) -> list[int]:
        """Stop scoring for a search; the ids of the calls that get no answer."""
        self._waiting = [reading for reading in self._waiting if reading.tree != tree]
        for sequence in [sequence for sequence in self.batch.sequences if sequence.tree == tree]:
            self.batch.drop(sequence)
        calls = [*self._calls.values(), *self._finished]
        self._calls = {id: call for id, call in self._calls.items() if call.tree != tree}
        self._finished = [call for call in self._finished if call.tree != tree]
        return [call.id for call in calls if call.tree == tree]

    def check(self) -> None:
        """Raise AssertionError unless the cache's accounting is right."""
        self.cache.check(self.searches)

    def release(self, tree: str) -> Counters | None:
        """Release a search that scores nothing; what it cost, None if it is unknown."""
        search = self.searches.get(tree)
        self._rewards.pop(tree, None)
        self._pieces.pop(tree, None)
        self._ahead.pop(tree, None)
        if search is None:
            return None
        self.cache.release(tree, search.prompt)
        self.past += search.counters
        del self.searches[tree]
        return search.counters

    def totals(self) -> Counters:
        """The costs of all searches, past and present."""
        return total_of(self.past, self.searches)

    def _must_fit(self, path: np.ndarray) -> None:
        must_fit(
            len(path),
            {"context": self._context, "prm_kv_tokens": self.cache.capacity},
            f"a trajectory of {len(path)} tokens does not fit the reward model's",
        )

    def _search_of(self, tree: str, opening: np.ndarray) -> TrackedSearch:
        if tree not in self.searches:
            self._arrivals += 1
            self.searches[tree] = TrackedSearch(self._arrivals)
            self._rewards[tree] = {}
        if len(opening):
            self.searches[tree].prompt = opening
        return self.searches[tree]

    def _admit(self) -> None:
        """Admit waiting paths, the trees in turn, as far as there are places and memory."""
        still_waiting = []
        places = Counter(sequence.tree for sequence in self.batch.sequences)
        waiting = fair_order(self._waiting, lambda reading: reading.tree, places)
        for index, reading in enumerate(waiting):
            refusal = self._enter(reading)
            if refusal is None:
                continue
            still_waiting.append(reading)
            if refusal is not Refusal.SHARED:
                still_waiting += waiting[index + 1 :]
                break
        self._waiting = sorted(still_waiting, key=order_of)

    def _look_ahead(self, reading: ScoreSequence, node: int, path: np.ndarray) -> None:
        """Read ``path`` along with ``reading``, if it continues that path and fits."""
        before = len(reading.path)
        fits = before < len(path) <= min(self._context, self.cache.capacity)
        if not fits or int(path.max()) >= self._vocab:
            return
        if np.array_equal(path[:before], reading.path):
            reading.ahead = path
            self._ahead.setdefault(reading.tree, {})[node] = path

    def _enter(self, reading: ScoreSequence) -> Refusal | None:
        """Start a path's sequence, or return why not. The step ahead is attached as a draft, which
        is dropped if there is no room."""
        end = len(reading.path)
        reading.size = end if reading.ahead is None else len(reading.ahead)
        refusal = self.batch.enter(reading, reading.path, end - 1)
        if refusal is None and reading.ahead is not None:
            reading.attach_draft(DraftTree(reading.ahead[end:].tolist()))
        return refusal

    def _read(self, advance: Advance) -> None:
        """Store the rewards of a path and of the step ahead, from the logits at their ends."""
        assert advance.logits is not None, "a path was read before its end"
        reading = advance.sequence
        assert isinstance(reading, ScoreSequence), "a sequence that is not the scorer's"
        if advance.start < len(reading.path):
            self._note(reading, advance.logits[0])
        if reading.ahead is not None and reading.computed == len(reading.ahead):
            ahead = self._reader.reading.reward(advance.logits[-1])
            self._rewards[reading.tree][reading.ahead.tobytes()] = ahead

    def _note(self, reading: ScoreSequence, logits: torch.Tensor) -> None:
        """Store a path's reward and update the calls that wait for it."""
        key = reading.path.tobytes()
        self._rewards[reading.tree][key] = self._reader.reading.reward(logits)
        for call in [call for call in self._calls.values() if call.tree == reading.tree]:
            call.unread.discard(key)
            self._settle(call)

    def _settle(self, call: ScoreCall) -> None:
        if not call.unread:
            self._finished.append(self._calls.pop(call.id))

    def _requeue(self, reading: ScoreSequence) -> None:
        """Make a preempted path wait again, unless its reward has been read."""
        reading.ahead = None
        if reading.path.tobytes() not in self._rewards[reading.tree]:
            insort(self._waiting, reading, key=order_of)


def load_scorer(options: EngineOptions) -> RewardScorer | None:
    """The scorer, if the format needs a reward model and there is one.

    Raises RewardMissing for a missing tag, verdict or head; ValueError for other faults.
    """
    model = load_reward_model(options)
    if model is None:
        return None
    forward, reader = model
    return RewardScorer(options, forward, forward.config, reader)


def load_reward_model(options: EngineOptions) -> tuple[Forward, Reader] | None:
    """The model and its ``Reader``; None and errors as in ``load_scorer``."""
    form = reward_format(options.reward_format)
    if options.prm is None or not form.needs_model:
        return None
    reader = Reader.of(form, Text(options.prm), Text(options.policy))
    forward = Forward(
        options.prm,
        exact=options.exact,
        threads=options.pass_threads,
        head=not form.reads_hidden,
        kernel=options.kernel,
    )
    return forward, reader
