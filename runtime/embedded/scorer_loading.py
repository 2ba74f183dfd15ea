"""What scores in the embedded engine, the reward model or the policy as judge, and what embeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from runtime.embedded.batch import Forwards
from runtime.embedded.hidden_states import HiddenStates
from runtime.embedded.judge_scorer import JudgeScorer
from runtime.embedded.model.config import ModelConfig
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.reward_scorer import RewardScorer
from runtime.embedded.scheduler import Scheduler
from runtime.embedded.step_embedder import StepEmbedder, Words
from runtime.embedded.tracked_search import TrackedSearch
from runtime.judge import Judge
from runtime.reward_format import reward_format
from runtime.reward_reader import Reader, overhead_of
from runtime.text import Text


def load_scorer(options: EngineOptions) -> tuple[RewardScorer, tuple[int, int]] | None:
    """The reward model and the format's overhead, if the format reads one and there is one.

    Raises what is wrong with it: RewardMissing for a tag, a verdict or a head, ValueError else.
    """
    found = load_reward_model(options)
    if found is None:
        return None
    forward, reader = found
    return scorer_for(options, forward, forward.config, reader), overhead_of(reader.paths)


def load_reward_model(options: EngineOptions) -> tuple[Forward, Reader] | None:
    """The model and what reads its rewards; None and errors as ``load_scorer``."""
    form = reward_format(options.reward_format)
    if options.prm is None or not form.needs_model:
        return None
    reader = Reader.of(form, Text(options.prm), Text(options.policy))
    head = not form.reads_hidden
    how, threads = options.arithmetic, options.pass_threads
    return Forward(options.prm, threads=threads, head=head, **how), reader


def scorer_for(
    options: EngineOptions, model: Forwards, config: ModelConfig, reader: Reader
) -> RewardScorer:
    """A scorer on a reward model with this configuration, nothing to read as yet.

    Raises ValueError without a reward model.
    """
    if options.prm is None:
        raise ValueError("prm: None; a reward model is needed")
    head = not reward_format(options.reward_format).reads_hidden

    def flops(tokens: int, context_sum: int, logits: int) -> float:
        return config.flops(tokens, context_sum, logits if head else 0)

    return RewardScorer(
        model,
        reader,
        context=Text(options.prm).context,
        vocab=config.vocab,
        kv_tokens=options.prm_kv_tokens,
        batch_limit=options.batch_limit,
        flops=flops,
    )


def load_judge(
    options: EngineOptions, scheduler: Scheduler
) -> tuple[JudgeScorer, tuple[int, int]] | None:
    """The policy as judge and the format's overhead, if the format asks for one."""
    form = reward_format(options.reward_format)
    if form.reads != "judge":
        return None
    text = Text(options.policy)
    judge = Judge(form, text)
    once, each = judge.overhead()
    if once >= text.context:
        raise ValueError(
            f"reward_format {form.name!r}: template and verdict_tokens take {once} tokens; the "
            f"context of {text.checkpoint} holds {text.context}"
        )
    return JudgeScorer(scheduler, judge), (once, each)


def load_embedder(
    options: EngineOptions, policy: Forward, accounts: Mapping[str, TrackedSearch]
) -> StepEmbedder | None:
    """What ``options.embedder`` names; None for what needs no model of this process.

    ``accounts``: of the searches in flight, to which reading hidden states is charged.
    """
    if options.embedder == "hidden":
        hidden = HiddenStates(policy, options.embedder_layer)

        def charge(tree: str, steps: Sequence[Words]) -> None:
            account = accounts.get(tree)
            if account is not None:
                account.counters.flops += hidden.flops([step.tokens for step in steps])
                account.counters.model_calls += 1

        return StepEmbedder(lambda steps: hidden.embed_steps([s.tokens for s in steps]), charge)
    if options.embedder == "encoder" and options.encoder is not None:
        from runtime.embedders.encoder import Encoder

        encoder = Encoder(options.encoder)
        return StepEmbedder(
            lambda steps: encoder.embed_texts([step.text for step in steps]), lambda *_: None
        )
    return None
