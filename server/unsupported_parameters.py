"""Parameters of OpenAI, vLLM and SGLang that this server does not support.

Each has neutral values, with which it has no effect and is accepted. With any other value the
request is refused, because the reply would not be what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]


def _only(neutral: Any, names: str) -> dict[str, tuple[Any, ...]]:
    """Map each name to its neutral values: null and ``neutral``."""
    return dict.fromkeys(names.split(), (None, neutral))


_SHARED: Neutral = {
    **_only(0, "dry_multiplier xtc_probability priority min_new_tokens"),
    **_only(1, "typical_p length_penalty"),
    **_only({}, "custom_params"),
    **_only([], "bad_words logits_processors stop_token_ids stop_regex"),
    **_only(
        False,
        "use_beam_search early_stopping include_stop_str_in_output no_stop_trim "
        "return_hidden_states return_tokens_as_token_ids return_token_ids",
    ),
    **_only(True, "skip_special_tokens spaces_between_special_tokens"),
    **_only(
        None,
        "allowed_token_ids custom_logit_processor lora_path truncate_prompt_tokens "
        "guided_regex guided_choice "
        "guided_grammar guided_decoding_backend guided_whitespace_pattern structural_tag "
        "json_schema regex ebnf grammar prompt_logprobs",
    ),
}

CHAT: Neutral = {
    **_SHARED,
    **_only(1, "best_of"),
    **_only({}, "chat_template_kwargs mm_processor_kwargs"),
    **_only([], "functions documents"),
    **_only(False, "echo add_special_tokens"),
    **_only(True, "separate_reasoning"),
    **_only(["text"], "modalities"),
    **_only("medium", "verbosity"),
    **_only(None, "audio prediction web_search_options chat_template enable_thinking"),
    "function_call": (None, "none", "auto"),
}
"""The unsupported parameters of chat completions."""

TEXT: Neutral = {
    **_SHARED,
    **_only(None, "prompt_embeds max_completion_tokens"),
    **_only(1, "best_of"),
    **_only("", "suffix"),
    **_only([], "tools"),
    **_only("none", "reasoning_effort"),
    **_only(False, "add_special_tokens"),
}
"""The unsupported parameters of text completions."""

RESPONSES: Neutral = {
    **_only(0, "max_tool_calls"),
    **_only(False, "store background"),
    **_only("disabled", "truncation"),
    **_only(None, "previous_response_id conversation prompt"),
}
"""The unsupported parameters of ``/v1/responses``."""

SCORE: Neutral = {
    **_only(0, "priority"),
    **_only({}, "mm_processor_kwargs"),
    **_only(True, "use_activation activation softmax"),
    **_only(False, "add_special_tokens"),
    **_only(None, "truncate_prompt_tokens instruction chat_template"),
}
"""The unsupported parameters of ``/v1/score``."""

HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "parallel_tool_calls"),
        *("prompt_cache_key", "prompt_cache_retention", "safety_identifier"),
    )
)
"""Fields of OpenAI's API that are ignored silently."""


def asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a parameter's value is one of its neutral ones; true does not equal 1 here."""
    return any(isinstance(value, bool) == isinstance(n, bool) and value == n for n in neutral)
