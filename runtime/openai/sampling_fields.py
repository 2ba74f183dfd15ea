"""What vLLM is sent of the sampling parameters beside temperature and top-p."""

from __future__ import annotations

from typing import Any

from search.engine import Sampling

HONOURED = ("top_k", "min_p", "logit_bias", "min_tokens", "repetition_penalty")
"""What comes to the same whether a trajectory is one request or one a step. vLLM counts the output
for its other penalties, of presence and of frequency, from where a request begins."""


def sampling_fields(sampling: Sampling, path: int, most: int) -> dict[str, Any]:
    """Fields of a request for at most ``most`` tokens after ``path`` tokens.

    Of ``min_tokens`` is left what the output has not yet; no stop string ends the request before,
    so that a step is cut here.
    """
    params = sampling.logits
    fields = {name: getattr(params, name) for name in params.asked() if name in HONOURED}
    if "min_tokens" in fields:
        fields["min_tokens"] = sampling.min_tokens_left(path, most)
    if "logit_bias" in fields:
        fields["logit_bias"] = {str(token): bias for token, bias in params.logit_bias}
    return fields
