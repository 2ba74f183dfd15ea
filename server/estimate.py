"""What a search may cost, before it is run."""

from __future__ import annotations

from typing import Any

from server.limits import most_tokens
from server.request_parsing import ParsedRequest
from server.service import Service


def estimate(parsed: ParsedRequest, service: Service) -> dict[str, Any]:
    """The most that a search can come to by its spec, and what such ones came to here."""
    spec = parsed.spec
    assert spec is not None, "a plain reply is not estimated"
    prompt = len(parsed.problem.prompt)
    most = most_tokens(spec)
    return {
        "object": "search.estimate",
        "model": parsed.model,
        "spec": spec.model_dump(),
        "prompt_tokens": prompt,
        "most": {"completion_tokens": most, "kv_tokens": prompt + most, "seconds": parsed.seconds},
        "typical": service.typical_cost.typical(spec.policy, spec.width),
    }
