"""An engine's draft model and what schedules it, by the engine's options."""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.embedded.drafting.drafter import Drafter
from runtime.embedded.drafting.pace import Pace
from runtime.embedded.drafting.speculation import Speculation
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.text import Text


def load_speculation(
    options: EngineOptions, policy: Text, clock: Callable[[], float] = time.perf_counter
) -> Speculation | None:
    """None where nothing is to draft. Raises ValueError for a draft with another tokenizer.

    The draft's arithmetic need not be exact: what it says is never part of an answer.
    """
    if options.draft == "off" or options.draft_model is None:
        return None
    text = Text(options.draft_model)
    if text.pieces != policy.pieces:
        raise ValueError(f"draft_model: {text.checkpoint} has another tokenizer than the policy")
    forward = Forward(
        options.draft_model, exact=False, threads=options.pass_threads, kernel=options.kernel
    )
    pace = Pace(options.draft_tokens, options.k_config)
    drafter = Drafter(
        forward,
        context=text.context,
        kv_tokens=options.draft_kv_tokens,
        batch_limit=options.batch_limit,
        eos=policy.eos,
        flops=forward.config.flops,
        timed=pace.draft.add,
        clock=clock,
        rule=options.draft_rule,
    )
    return Speculation(
        drafter,
        pace,
        serial=options.draft == "serial",
        verify_batch=options.verify_batch,
        clock=clock,
    )
