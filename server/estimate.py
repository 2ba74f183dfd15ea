"""What a search may cost, before it is run."""

from __future__ import annotations

from typing import Any

from server.ask import Ask
from server.limits import most_tokens
from server.service import Service


def estimate(ask: Ask, service: Service) -> dict[str, Any]:
    """The most that a search can come to by its spec, and what such ones came to here."""
    spec = ask.spec
    assert spec is not None, "a plain reply is not estimated"
    prompt = len(ask.problem.prompt)
    most = most_tokens(spec)
    return {
        "object": "search.estimate",
        "model": ask.model,
        "spec": spec.model_dump(),
        "prompt_tokens": prompt,
        "most": {"completion_tokens": most, "kv_tokens": prompt + most, "seconds": ask.seconds},
        "typical": service.experience.typical(spec.policy, spec.width),
    }
