"""What scores in the embedded engine: the reward model, or the policy as judge, by the format."""

from __future__ import annotations

from runtime.embedded.drawing.scheduler import Scheduler
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.scoring.judge import Bench
from runtime.embedded.scoring.scorer import Scorer
from runtime.judge import Judge
from runtime.reward_format import reward_format
from runtime.reward_reader import Reader
from runtime.text import Text


def load_scorer(options: EngineOptions) -> tuple[Scorer, tuple[int, int]] | None:
    """The reward model and the format's overhead, if the format reads one and there is one.

    Raises what is wrong with it: RewardMissing for a tag, a verdict or a head, ValueError else.
    """
    form = reward_format(options.reward_format)
    if options.prm is None or not form.needs_model:
        return None
    text = Text(options.prm)
    reader = Reader.of(form, text, Text(options.policy))
    head = not form.reads_hidden
    forward = Forward(options.prm, exact=options.exact, threads=options.cores, head=head)

    def flops(tokens: int, context_sum: int, logits: int) -> float:
        return forward.config.flops(tokens, context_sum, logits if head else 0)

    scorer = Scorer(
        forward,
        reader,
        context=text.context,
        vocab=forward.config.vocab,
        kv_tokens=options.prm_kv_tokens,
        batch_limit=options.batch_limit,
        flops=flops,
    )
    return scorer, reader.overhead()


def load_judge(
    options: EngineOptions, scheduler: Scheduler
) -> tuple[Bench, tuple[int, int]] | None:
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
    return Bench(scheduler, judge), (once, each)
