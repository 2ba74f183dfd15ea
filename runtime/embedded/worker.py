"""The engine's own process: reads calls from a pipe, runs both models, answers.

Between two iterations it looks for messages; with nothing to do it waits for one and checks its
books. It ends when it is told to, or when the other end of the pipe is gone.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from runtime.embedded.drafting.draft import load_speculation
from runtime.embedded.drawing.account import Account
from runtime.embedded.drawing.batch import Forwards
from runtime.embedded.drawing.sampler import draw
from runtime.embedded.drawing.scheduler import Scheduler
from runtime.embedded.fingerprint import fingerprint
from runtime.embedded.kv.resplit import Resplit
from runtime.embedded.kv.split import Shared, split_pools
from runtime.embedded.messages import (
    Abort,
    Done,
    Embed,
    Expand,
    Failed,
    FromEngine,
    Hinted,
    Ping,
    Ready,
    Refused,
    Release,
    Report,
    Score,
    Stop,
    ToEngine,
)
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.forward import Forward
from runtime.embedded.model.thread_timing import fastest_threads
from runtime.embedded.model.threads import thread_counts
from runtime.embedded.options import EngineOptions
from runtime.embedded.outlet import Outlet
from runtime.embedded.scoring.embedder import Embedder, Words
from runtime.embedded.scoring.hidden import HiddenStates
from runtime.embedded.scoring.scorers import load_judge, load_scorer
from runtime.reward_format import reward_format
from runtime.text import Text
from search.engine import Capabilities, EngineError, KvFull, RewardMissing, TreeCost, Usage

log = logging.getLogger(__name__)

REPORT_SECONDS = 0.25
IDLE_SECONDS = 0.05


def run(pipe: Outlet, options: EngineOptions) -> None:
    """The process's main function."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the server's process decides when to end
    try:
        worker = Worker(pipe, options)
    except (EngineError, ValueError, OSError) as error:
        pipe.send(Refused(error))
        return
    gc.collect()
    gc.freeze()  # what stays for good is not looked through again and again
    with contextlib.suppress(BrokenPipeError):  # nobody is left to hear answers
        worker.serve()


class Worker:
    """Both models, and the loop."""

    def __init__(self, pipe: Outlet, options: EngineOptions) -> None:
        """Loads the models. Raises what is wrong with the options."""
        self._format = reward_format(options.reward_format)
        models = {"policy": options.policy, "prm": options.prm}
        context = min(Text(path).context for path in models.values() if path is not None)
        counts = (options.threads,) if options.threads else thread_counts(options.cores)
        how = options.arithmetic
        forward = Forward(options.policy, threads=options.cores, counts=counts, **how)
        threads = fastest_threads(forward, counts)
        options = replace(options, threads=threads.most, by_rows=threads)
        by_roofline, shared = options.kv_split == "roofline", Shared.of(options)
        options = split_pools(options, shared)
        self._pipe = pipe
        self._options = options
        self._scheduler = scheduler_for(options, forward, forward.config)
        scorer, judge = load_scorer(options), load_judge(options, self._scheduler)
        self._scorer = scorer[0] if scorer else None
        self._judge = judge[0] if judge else None
        scoring = scorer or judge
        self._resplit: Resplit | None = None
        if shared and by_roofline and self._scorer:
            stores = self._scheduler.batch, self._scorer.batch
            self._resplit = Resplit(shared, *stores, step=options.kv_load.new)
        self._embedder = self._steps_embedder(forward)
        self._reported = 0.0
        self._wrong_books = 0
        self._unchecked = False
        self._capabilities = Capabilities(
            engine="embedded",
            models={name: str(path) for name, path in models.items() if path is not None},
            exact=options.same_trees,
            scores=scoring is not None or not self._format.needs_model,
            embeds=options.embedder,
            context_tokens=context,
            fingerprint=fingerprint(options, forward.attends),
            score_tokens=scoring[1] if scoring else (0, 0),
            threads=options.threads,
            kernel=forward.kernel,
        )

    def serve(self) -> None:
        """Answer until told to stop."""
        self._send(Ready(self._capabilities, self._report()))
        while self._listen():
            if self._resplit:
                self._resplit.settle()
            if self._scheduler.busy:
                for drawn in self._scheduler.step():
                    if self._resplit:
                        self._resplit.drew(drawn.tree, drawn.steps)
                    ruled = self._judge.rule(drawn) if self._judge else None
                    if ruled is not None:
                        self._answer(drawn.call, ruled.rewards)
                        continue
                    said = Done(drawn.call, drawn.steps, self._report(), drawn.tree, drawn.moved)
                    self._send(said)
                for call in self._scheduler.starved():
                    said = f"kv_tokens: {self._scheduler.cache.capacity} are all held for searches"
                    self._send(Failed(call, KvFull(said), self._report()))
            if self._scorer is not None and self._scorer.busy:
                for scored in self._scorer.step():
                    self._answer(scored.call, scored.rewards)
            if self._embedder is not None and self._embedder.busy:
                for embedded in self._embedder.step():
                    self._answer(embedded.call, embedded.result)
            self._report_in_time()

    @property
    def _busy(self) -> bool:
        beside = (self._scorer, self._embedder)
        return self._scheduler.busy or any(part is not None and part.busy for part in beside)

    def _listen(self) -> bool:
        """Take all messages that are there, waiting for one when idle; False to stop."""
        if self._unchecked and not self._busy and not self._pipe.poll(IDLE_SECONDS):
            self._check_books()
        while not self._busy or self._pipe.poll():
            try:
                message: ToEngine = self._pipe.recv()
            except (EOFError, ConnectionResetError):
                return False
            if isinstance(message, Stop):
                return False
            self._take(message)
        return True

    def _take(self, message: ToEngine) -> None:
        self._unchecked = True
        if isinstance(message, Hinted):
            self._scheduler.hint(message.tree, message.hint)
            for scoring in (self._scorer, self._judge):
                if scoring is not None:
                    scoring.hint(message.tree, message.hint)
            return
        assert not isinstance(message, Stop), "stop is handled where messages are read"
        try:
            self._begin(message)
        except EngineError as error:
            self._send(Failed(message.call, error, self._report()))

    def _begin(self, message: Expand | Score | Embed | Release | Abort | Ping) -> None:
        """Start a call, or answer it where that takes no model."""
        match message:
            case Expand(call, tree, branches, sampling):
                self._scheduler.expand(call, tree, branches, sampling)
                if self._resplit:
                    self._resplit.asked(tree, branches)
            case Score():
                self._score(message)
            case Embed(call, tree, steps):
                assert self._embedder is not None, "what needs no model is embedded elsewhere"
                self._embedder.embed(call, tree, steps)
            case Release(call, tree):
                self._answer(call, self._stop(tree))
            case Abort(call, tree):
                self._stop(tree)
                self._answer(call, None)
            case Ping(call):
                self._answer(call, None)

    def _score(self, message: Score) -> None:
        tree, prompt = message.tree, message.prompt
        for trajectory in message.trajectories:
            if not trajectory.steps or not all(trajectory.steps):
                raise EngineError(f"steps: node {trajectory.node} has an empty one or none")
        if self._judge is not None:
            self._judge.score(message.call, tree, message.question, message.trajectories)
        elif not self._format.needs_model:
            self._answer(
                message.call, [self._likelihood(message, t.steps) for t in message.trajectories]
            )
        elif self._scorer is None:
            raise RewardMissing(f"reward_format {self._format.name!r}: no reward model is loaded")
        else:
            early = self._scheduler.expansion
            ahead = early.whole(tree, message.trajectories) if self._options.lookahead else {}
            trajectories = message.trajectories
            self._scorer.score(message.call, tree, prompt, message.question, trajectories, ahead)

    def _likelihood(self, message: Score, steps: tuple[tuple[int, ...], ...]) -> float:
        try:
            return math.exp(self._scheduler.mean_logprob(message.tree, message.prompt, steps))
        except KeyError:
            raise RewardMissing(
                f"reward_format {self._format.name!r}: a step of tree {message.tree!r} was not "
                "drawn by this engine"
            ) from None

    def _stop(self, tree: str) -> TreeCost:
        """End everything of a tree; what it cost."""
        stopped = self._scheduler.abort(tree)
        if self._resplit:
            self._resplit.ended(tree)
        if self._embedder is not None:
            stopped += self._embedder.abort(tree)
        prm, judged, unparsed = None, None, 0
        if self._scorer is not None:
            stopped += self._scorer.abort(tree)
            prm = self._scorer.release(tree)
        if self._judge is not None:
            stopped += self._judge.abort(tree)
            judged, unparsed = self._judge.release(tree)
        policy = self._scheduler.release(tree)
        if self._options.strict:
            self._check_books()
        for call in stopped:
            error = EngineError(f"tree {tree!r} was aborted")
            self._send(Failed(call, error, self._report()))
        cost = cost_of(policy or Account(0), prm or Account(0), judged or Account(0))
        return replace(cost, unparsed_verdicts=unparsed)

    def _steps_embedder(self, forward: Forward) -> Embedder | None:
        """What ``options.embedder`` names; None for what needs no model of this process."""
        options = self._options
        if options.embedder == "hidden":
            hidden = HiddenStates(forward, options.embedder_layer)

            def charge(tree: str, steps: Sequence[Words]) -> None:
                account = self._scheduler.accounts.get(tree)
                if account is not None:
                    account.flops += hidden.flops([step.tokens for step in steps])
                    account.passes += 1

            return Embedder(lambda steps: hidden.embed_steps([s.tokens for s in steps]), charge)
        if options.embedder == "encoder" and options.encoder is not None:
            from runtime.embedders.encoder import Encoder

            encoder = Encoder(options.encoder)
            return Embedder(
                lambda steps: encoder.embed_texts([step.text for step in steps]), lambda *_: None
            )
        return None

    def _answer(self, call: int, value: list | TreeCost | EngineError | None) -> None:
        report = self._report()
        failed = isinstance(value, EngineError)
        self._send(Failed(call, value, report) if failed else Done(call, value, report))

    def _send(self, message: FromEngine) -> None:
        self._reported = time.monotonic()
        self._pipe.send(message)

    def _report_in_time(self) -> None:
        """Say something now and then while calls take long."""
        if time.monotonic() - self._reported > REPORT_SECONDS:
            self._send(self._report())

    def _report(self) -> Report:
        scheduler, scorer = self._scheduler, self._scorer
        policy, prm = scheduler.totals(), scorer.totals() if scorer else Account(0)
        judged = self._judge.totals() if self._judge else Account(0)
        cache, prm_cache = scheduler.cache, scorer.cache if scorer else None
        usage = Usage(
            kv_tokens_active=cache.active_tokens,
            kv_tokens_cached=cache.cached_tokens,
            kv_tokens_capacity=cache.capacity,
            kv_tokens_peak=cache.active_peak,
            prm_kv_tokens_active=prm_cache.active_tokens if prm_cache else 0,
            prm_kv_tokens_cached=prm_cache.cached_tokens if prm_cache else 0,
            prm_kv_tokens_capacity=prm_cache.capacity if prm_cache else 0,
            running=scheduler.running,
            waiting=scheduler.waiting,
            decoded_tokens_total=policy.decoded_tokens - judged.decoded_tokens,
            prefilled_tokens_total=policy.prefilled_tokens - judged.prefilled_tokens,
            cached_tokens_total=policy.cached_tokens - judged.cached_tokens,
            prm_tokens_total=prm.prefilled_tokens + judged.computed_tokens,
            evicted_tokens_total=cache.evicted_tokens,
            rehydrated_tokens_total=policy.rehydrated_tokens,
            rehydrations_total=policy.rehydrations,
            prm_kv_tokens_peak=prm_cache.active_peak if prm_cache else 0,
            held_evicted_tokens_total=cache.radix.held_evicted,
            prm_evicted_tokens_total=prm_cache.evicted_tokens if prm_cache else 0,
            prm_held_evicted_tokens_total=prm_cache.radix.held_evicted if prm_cache else 0,
            kv_policy_seconds_total=cache.retention.seconds,
            retractions_total=scheduler.retractions,
            wrong_books_total=self._wrong_books,
            target_passes_total=policy.target_passes,
            drafted_tokens_total=policy.drafted_tokens,
            accepted_tokens_total=policy.accepted_tokens,
            speculated_used_tokens_total=policy.speculated_used,
            speculated_wasted_tokens_total=policy.speculated_wasted,
        )
        counters = {
            "trims": cache.retention.trims,
            "kv_policy_us": int(1e6 * cache.retention.seconds),
            "held_evicted_tokens": cache.radix.held_evicted,
            "retractions": scheduler.retractions,
            "tested_tokens": policy.tested_tokens,
            "draft_pauses": scheduler.speculation.pace.pauses if scheduler.speculation else 0,
            "unison_tokens": policy.unison_tokens,
            "prm_evicted_tokens": prm_cache.evicted_tokens if prm_cache else 0,
            "verdicts": self._judge.verdicts if self._judge else 0,
            "unparsed_verdicts": self._judge.unparsed_verdicts if self._judge else 0,
            "wrong_books": self._wrong_books,
            "kv_splits": self._resplit.moves if self._resplit else 0,
        }
        return Report(usage, counters)

    def _check_books(self) -> None:
        """Prove that no slot is lost; wrong books are fatal in strict mode, else counted."""
        try:
            self._scheduler.check()
            if self._scorer is not None:
                self._scorer.cache.check()
        except AssertionError:
            if self._options.strict:
                raise
            self._wrong_books += 1
            log.exception("the KV books are wrong")
        self._unchecked = False


def scheduler_for(
    options: EngineOptions,
    model: Forwards,
    config: ModelConfig,
    clock: Callable[[], float] = time.perf_counter,
) -> Scheduler:
    """The branches of a policy model with this configuration, none as yet.

    ``clock``: in seconds, what drafting is paced by.
    """
    text = Text(options.policy)
    return Scheduler(
        model,
        draw,
        text,
        context=text.context,
        vocab=config.vocab,
        kv_tokens=options.kv_tokens,
        batch_limit=options.batch_limit,
        flops=config.flops,
        kv_policy=options.kv_policy,
        worth=options.worth(),
        speculation=load_speculation(options, text, clock),
        speculate=options.speculate,
        visits=options.order,
        unison=options.unison,
    )


def cost_of(policy: Account, prm: Account, judged: Account) -> TreeCost:
    """What a tree cost, by what each model booked for it."""
    return TreeCost(
        decoded_tokens=policy.decoded_tokens,
        prefilled_tokens=policy.prefilled_tokens,
        cached_tokens=policy.cached_tokens,
        prm_tokens=prm.prefilled_tokens + judged.computed_tokens,
        model_calls=policy.passes + prm.passes + judged.passes,
        flops=policy.flops + prm.flops + judged.flops,
        kv_tokens_peak=policy.peak,
        rehydrated_tokens=policy.rehydrated_tokens,
        rehydrations=policy.rehydrations,
        target_passes=policy.target_passes,
        drafted_tokens=policy.drafted_tokens,
        tested_tokens=policy.tested_tokens,
        accepted_tokens=policy.accepted_tokens,
        speculated_used=policy.speculated_used,
        speculated_wasted=policy.speculated_wasted,
        unison_tokens=policy.unison_tokens,
    )
