"""An engine's draft model and what schedules it, by the engine's options."""

from __future__ import annotations

import time
from collections.abc import Callable

from runtime.embedded.draft_length import DraftLength
from runtime.embedded.draft_model import DraftModel
from runtime.embedded.model.forward import Forward
from runtime.embedded.options import EngineOptions
from runtime.embedded.speculative_decoding import SpeculativeDecoder
from runtime.text import Text


def load_speculative_decoder(
    options: EngineOptions, policy: Text, clock: Callable[[], float] = time.perf_counter
) -> SpeculativeDecoder | None:
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
    pace = DraftLength(options.draft_tokens, options.k_config)
    drafter = DraftModel(
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
    return SpeculativeDecoder(
        drafter,
        pace,
        serial=options.draft == "serial",
        verify_batch=options.verify_batch,
        clock=clock,
    )
