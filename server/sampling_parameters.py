"""vLLM's sampling parameters beside temperature and top-p: as they are sent, and what they ask."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field

from search.capabilities import Capabilities
from search.engine import LOGITS_PARAMS, LogitsParams
from search.spec import (
    LogitBias,
    MinP,
    MinTokens,
    Penalty,
    RepetitionPenalty,
    SearchSpec,
    TopK,
    logits_params_of,
)
from server.api_errors import bad_value, unsupported


class SamplingParameters(BaseModel):
    """Of a plain reply, and of a search's draws where ``search`` does not say otherwise."""

    top_k: TopK | None = Field(default=None, description="below 1: of all tokens")
    min_p: MinP | None = None
    logit_bias: LogitBias | None = None
    min_tokens: MinTokens | None = Field(
        default=None, description="before the model or a stop string ends a reply"
    )
    repetition_penalty: RepetitionPenalty | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None

    def asked(self) -> dict[str, Any]:
        """Those that are given, by name."""
        values = {name: getattr(self, name) for name in LOGITS_PARAMS}
        return {name: value for name, value in values.items() if value is not None}

    def logits_params(self) -> LogitsParams:
        """What a plain reply is drawn by."""
        return logits_params_of(self.asked())

    def joined(self, spec: SearchSpec) -> SearchSpec:
        """The search, with these where it says nothing itself."""
        asked = self.asked().items()
        fresh = {name: value for name, value in asked if name not in spec.model_fields_set}
        return spec.model_copy(update=fresh) if fresh else spec


def must_be_honoured(
    params: LogitsParams, able: Capabilities, *, vocab: int, most: int, prefix: str = ""
) -> None:
    """Raise ApiError for what this engine does not honour over a whole reply, and for what cannot
    be: a token id from ``vocab`` on, more than ``most`` tokens. ``prefix``: of the fields' names.
    """
    for name in params.asked():
        if name not in able.logits_params:
            why = f"the {able.engine} engine does not honour it over a whole reply; leave it out"
            raise unsupported(prefix + name, why)
    for token, _ in params.logit_bias:
        if token >= vocab:
            raise bad_value(f"{prefix}logit_bias", f"ids are from 0 to {vocab - 1}, got {token}")
    if params.min_tokens > most:
        allowed = f"at most {most}, as a reply has no more tokens"
        raise bad_value(f"{prefix}min_tokens", f"{allowed}, got {params.min_tokens}")
