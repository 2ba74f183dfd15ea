"""The engine's own process: reads calls from a pipe, runs both models, sends answers.

Between two iterations it receives messages; while idle it waits for one and checks its accounting.
It ends when it is told to, or when the other end of the pipe is closed.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
import time

from runtime.embedded.fingerprint import fingerprint
from runtime.embedded.judge_scorer import cost_of_judging, load_judge, owner
from runtime.embedded.kv_split import split_pools
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.pipe import (
    Done,
    Embed,
    EngineEnd,
    Envelope,
    Expand,
    Failed,
    FromEngine,
    Ping,
    Ready,
    Release,
    Score,
    StartFailed,
    Stop,
    ToEngine,
    TreeHint,
)
from runtime.embedded.reward_scorer import load_scorer
from runtime.embedded.scheduler import scheduler_for
from runtime.embedded.sequence import ExpandResult
from runtime.embedded.shortlist import shortlist
from runtime.embedded.step_embedder import load_embedder
from runtime.embedded.validation import CallError, CallErrors, check, check_tuple
from runtime.json_schemas import spells_json
from runtime.reward_format import local_reward_format
from runtime.text import Text
from search.counters import Counters, EngineCounters, Usage, combined
from search.engine import (
    LOGITS_PARAMS,
    Branch,
    CallFault,
    Capabilities,
    EmbeddingMissing,
    EngineError,
    KvFull,
    PrefixTooLong,
    RewardMissing,
)

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.25
NAME_LETTERS = 200
"""Letters of a tree's name that are logged."""
IDLE_SECONDS = 0.05
RECEIVE_SECONDS = 0.05
"""CPU seconds of this thread for receiving messages before the next iteration; the last message may
take longer."""
EXPECTED = (PrefixTooLong, KvFull, RewardMissing, EmbeddingMissing)
"""Errors that a valid call may raise: nothing has begun then, or the search goes on without it."""


def run(pipe: EngineEnd, options: EngineOptions) -> None:
    """The process's main function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's process decides when to end
    try:
        loop = EngineLoop(pipe, options)
    except (EngineError, ValueError, OSError) as error:
        pipe.send(StartFailed(error))
        return
    gc.collect()
    gc.freeze()  # so that objects that stay for good are not scanned again and again
    with contextlib.suppress(BrokenPipeError):  # nobody is left to receive answers
        loop.serve()


class EngineLoop:
    """Both models, and the loop that serves calls."""

    def __init__(self, pipe: EngineEnd, options: EngineOptions) -> None:
        """Load the models. Raises EngineError, ValueError or OSError for wrong options."""
        self._format = local_reward_format(options.reward_format)
        models = {"policy": options.policy, "prm": options.prm}
        context = min(Text(path).context for path in models.values() if path is not None)
        forward = Forward(
            options.policy,
            exact=options.exact,
            threads=options.pass_threads,
            kernel=options.kernel,
        )
        shortlist()  # built now, so that the first request does not wait for it
        options = split_pools(options)
        self._pipe = pipe
        self._options = options
        self._scheduler = scheduler_for(options, forward, forward.config)
        self._scorer, self._judge = load_scorer(options), load_judge(options, self._scheduler)
        self._scoring = scoring = self._scorer or self._judge
        self._embedder = load_embedder(options, forward, self._scheduler.searches)
        self._last_report = 0.0
        self._kv_accounting_errors = self._call_errors = 0
        self._errors = CallErrors()
        self._unchecked = False
        self._capabilities = Capabilities(
            engine="embedded",
            models={name: str(path) for name, path in models.items() if path is not None},
            exact=options.same_trees,
            scores=scoring is not None or not self._format.needs_model,
            embeds=options.embedder,
            context_tokens=context,
            fingerprint=fingerprint(options, forward.attends),
            score_tokens=scoring.overhead if scoring else (0, 0),
            threads=options.cores,
            kernel=forward.kernel,
            outcome=self._format.outcome,
            likelihood=scoring is None,
            logits_params=LOGITS_PARAMS,
            logprobs=True,
            grammar=spells_json(Text(options.policy)),
        )

    def serve(self) -> None:
        """Answer calls until a message says to stop."""
        self._send(Ready(self._capabilities, self._usage()))
        while self.turn():
            pass

    def turn(self) -> bool:
        """Receive waiting messages and run one iteration of each part; False to stop."""
        if not self._receive_all():
            return False
        if self._scheduler.busy:
            self._decode()
        for part in (self._scorer, self._embedder):
            if part is not None and part.busy:
                for call, values in part.step():
                    self._answer(call, values)
                self._fail_calls(part.errors)
        if time.monotonic() - self._last_report > REPORT_SECONDS:  # calls take long
            self._send(self._usage())
        return True

    @property
    def busy(self) -> bool:
        """Whether any call is still unanswered."""
        parts = (self._scorer, self._embedder)
        return self._scheduler.busy or any(part is not None and part.busy for part in parts)

    def _decode(self) -> None:
        """Run one iteration of the policy model and answer the calls that it finishes."""
        for result in self._scheduler.step():
            with self._errors.at(result.tree, result.call):
                self._answer_round(result)
        for errors in (self._errors, self._scheduler.errors):
            self._fail_calls(errors)

    def _answer_round(self, result: ExpandResult) -> None:
        """Answer a finished round with its steps, or with rewards if the judge asked for it."""
        rewards = self._judge.rule(result) if self._judge else None
        if rewards is not None:
            self._answer(result.call, rewards)
        else:
            self._send(Done(result.call, result.steps, self._usage(), result.tree, result.moved))

    def _receive_all(self) -> bool:
        """Receive the messages that are there, waiting for one when idle; False to stop.

        While calls are running, receiving stops after RECEIVE_SECONDS for the next iteration.
        """
        if self._unchecked and not self.busy and not self._pipe.poll(IDLE_SECONDS):
            self._check_accounting()
        end = time.thread_time() + RECEIVE_SECONDS
        while not self.busy or (time.thread_time() < end and self._pipe.poll()):
            try:
                envelope = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                return False
            if not self._receive(envelope):
                return False
        return True

    def _receive(self, envelope: Envelope) -> bool:
        """Begin what a message asks for; False if it ends the process. An error in the message
        fails its own call alone."""
        self._unchecked = True
        call = envelope.call if type(envelope.call) is int else None
        with self._errors.at(None, call):
            message = envelope.open()
            if isinstance(message, Stop):
                return False
            tree = getattr(message, "tree", None)
            with self._errors.at(tree if isinstance(tree, str) else None, call):
                check(message)
                self._begin(message)
        self._fail_calls(self._errors)
        return True

    def _begin(self, message: ToEngine) -> None:
        """Start a call, or answer it at once if that needs no model."""
        match message:
            case TreeHint(tree, hint):
                self._scheduler.hint(tree, hint)
                if self._scoring is not None:
                    self._scoring.hint(tree, hint)
            case Expand(call, tree, branches, sampling):
                check_tuple("branches", branches, Branch)
                self._scheduler.expand(call, tree, branches, sampling)
            case Score():
                self._score(message)
            case Embed(call, tree, steps):
                if self._embedder is None:
                    raise EngineError("embedder: what needs no model is embedded elsewhere")
                self._embedder.embed(call, tree, steps)
            case Release(call, tree):
                self._answer(call, self._stop(tree))
            case Ping(call):
                self._answer(call, None)

    def _fail_calls(self, errors: CallErrors) -> None:
        """Answer calls with their errors. For an error that is not EXPECTED, everything of its tree
        is dropped, and the tree's other calls fail as well.

        Raises AssertionError if the KV accounting is wrong afterwards: the process must end then.
        """
        for fault in errors.take():
            calls = set() if fault.call is None else {fault.call}
            if not isinstance(fault.error, EXPECTED):
                calls.update(self._drop_failed(fault))
            error = fault.error
            if not isinstance(error, EngineError):
                kind = type(error).__name__
                error = CallFault(f"the engine failed at this call ({kind}); its log says more")
            for call in sorted(calls):
                self._send(Failed(call, error, self._usage()))

    def _drop_failed(self, fault: CallError) -> list[int]:
        """Count and log an error and drop its tree; returns the ids of the tree's open calls."""
        self._call_errors += 1
        tree = None if fault.tree is None else owner(fault.tree)
        name = None if tree is None else tree[:NAME_LETTERS]
        log.error("tree %r, call %s: %s", name, fault.call, fault.error, exc_info=fault.error)
        if tree is None:
            return []
        calls, _ = self._drop(tree)
        self._check_accounting(fatal=True)
        return calls

    def _score(self, message: Score) -> None:
        tree, prompt = message.tree, message.prompt
        if self._judge is not None:
            self._judge.score(message.call, tree, message.question, message.trajectories)
        elif self._scorer is not None:
            extension, trajectories = self._scheduler.beam_extension, message.trajectories
            lookahead = self._options.lookahead
            ahead = extension.finished_next_steps(tree, trajectories) if lookahead else {}
            self._scorer.score(message.call, tree, prompt, message.question, trajectories, ahead)
        elif self._format.needs_model:
            raise RewardMissing(f"reward_format {self._format.name!r}: no reward model is loaded")
        else:
            rewards = [self._likelihood(message, t.steps) for t in message.trajectories]
            self._answer(message.call, rewards)

    def _likelihood(self, message: Score, steps: tuple[tuple[int, ...], ...]) -> float:
        try:
            return math.exp(self._scheduler.steps.mean_logprob(message.tree, message.prompt, steps))
        except KeyError:
            raise RewardMissing(
                f"reward_format {self._format.name!r}: a step of tree {message.tree!r} was not "
                "drawn by this engine"
            ) from None

    def _stop(self, tree: str) -> Counters:
        """End everything of a tree, fail its calls, and return what it cost."""
        calls, cost = self._drop(tree)
        if self._options.strict:
            self._check_accounting()
        for call in calls:
            error = EngineError(f"tree {tree!r} was aborted")
            self._send(Failed(call, error, self._usage()))
        return cost

    def _drop(self, tree: str) -> tuple[list[int], Counters]:
        """Drop everything of a tree; the ids of its open calls, and what it cost."""
        calls = self._scheduler.abort(tree)
        costs = []
        if self._embedder is not None:
            calls += self._embedder.abort(tree)
        if self._scoring is not None:
            calls += self._scoring.abort(tree)
            costs.append(self._scoring.release(tree))
        costs.append(self._scheduler.release(tree))
        return calls, combined(Counters, (cost for cost in costs if cost is not None))

    def _answer(self, call: int, value: list | Counters | EngineError | None) -> None:
        usage = self._usage()
        is_error = isinstance(value, EngineError)
        self._send(Failed(call, value, usage) if is_error else Done(call, value, usage))

    def _send(self, message: FromEngine) -> None:
        self._last_report = time.monotonic()
        self._pipe.send(message)

    def _usage(self) -> Usage:
        """The current usage, put together from the counters of all parts."""
        scheduler, cache = self._scheduler, self._scheduler.cache
        prm = self._scorer.cache if self._scorer else None
        searches = scheduler.totals()
        if self._judge is not None:
            judging = self._judge.totals()
            searches = searches - judging + cost_of_judging(judging)
        if self._scorer is not None:
            searches += self._scorer.totals()
        totals = EngineCounters.of(
            searches,
            verdicts=self._judge.verdicts if self._judge else 0,
            evicted_tokens=cache.evicted_tokens,
            held_evicted_tokens=cache.radix.held_evicted,
            prm_evicted_tokens=prm.evicted_tokens if prm else 0,
            prm_held_evicted_tokens=prm.radix.held_evicted if prm else 0,
            evictions=cache.evictor.evictions,
            kv_policy_seconds=cache.evictor.seconds,
            preemptions=scheduler.preemptions,
            draft_pauses=scheduler.speculation.draft_length.pauses if scheduler.speculation else 0,
            call_errors=self._call_errors,
            kv_accounting_errors=self._kv_accounting_errors,
        )
        return Usage(
            kv_tokens_active=cache.active_tokens,
            kv_tokens_cached=cache.cached_tokens,
            kv_tokens_capacity=cache.capacity,
            kv_tokens_peak=cache.active_peak,
            prm_kv_tokens_active=prm.active_tokens if prm else 0,
            prm_kv_tokens_cached=prm.cached_tokens if prm else 0,
            prm_kv_tokens_capacity=prm.capacity if prm else 0,
            prm_kv_tokens_peak=prm.active_peak if prm else 0,
            running=scheduler.running,
            waiting=scheduler.waiting,
            totals=totals,
        )

    def _check_accounting(self, *, fatal: bool = False) -> None:
        """Log and count wrong KV accounting; raise AssertionError if ``fatal`` or if strict."""
        try:
            self._scheduler.check()
            if self._scorer is not None:
                self._scorer.check()
        except AssertionError:
            if fatal or self._options.strict:
                raise
            self._kv_accounting_errors += 1
            log.exception("the KV accounting is wrong")
        self._unchecked = False
