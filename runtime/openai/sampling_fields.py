"""Request fields for vLLM's sampling parameters other than temperature and top-p."""

from __future__ import annotations

from typing import Any

from search.engine import Sampling

HONOURED = ("top_k", "min_p", "logit_bias", "min_tokens", "repetition_penalty")
"""Parameters that act the same whether a trajectory is one request or one a step. vLLM's presence
and frequency penalties do not: they count output only from where a request begins."""


def sampling_fields(sampling: Sampling, path: int, most: int) -> dict[str, Any]:
    """Fields of a request for at most ``most`` tokens after ``path`` tokens.

    ``min_tokens`` is reduced by the output so far. Until it is reached no stop string ends the
    request, so steps are cut on this side.
    """
    params = sampling.logits
    fields = {name: getattr(params, name) for name in params.active() if name in HONOURED}
    if "min_tokens" in fields:
        fields["min_tokens"] = sampling.min_tokens_left(path, most)
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return fields
