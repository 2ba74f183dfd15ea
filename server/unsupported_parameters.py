"""Parameters that other servers know and this one does not honour.

Each with the values under which it asks nothing: with any other the reply would not be what was
asked for, so the request is refused. The names are OpenAI's, vLLM's and SGLang's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Neutral = Mapping[str, tuple[Any, ...]]

_SAMPLING: Neutral = {
    "top_k": (None, -1, 0),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "repetition_penalty": (None, 1),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "length_penalty": (None, 1),
    "dry_multiplier": (None, 0),
    "xtc_probability": (None, 0),
    "logit_bias": (None, {}),
    "allowed_token_ids": (None,),
    "bad_words": (None, []),
    "custom_logit_processor": (None,),
    "custom_params": (None, {}),
    "logits_processors": (None, []),
    "use_beam_search": (None, False),
    "early_stopping": (None, False),
    "lora_path": (None,),
    "priority": (None, 0),
}
_ENDS: Neutral = {
    "min_tokens": (None, 0),
    "min_new_tokens": (None, 0),
    "stop_token_ids": (None, []),
    "stop_regex": (None, []),
    "include_stop_str_in_output": (None, False),
    "no_stop_trim": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": (None,),
    "thinking_token_budget": (None,),
}
_GRAMMARS: Neutral = {
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "structural_tag": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "grammar": (None,),
}
_TOLD: Neutral = {
    "prompt_logprobs": (None,),
    "return_hidden_states": (None, False),
    "return_tokens_as_token_ids": (None, False),
    "return_token_ids": (None, False),
}
_SHARED: Neutral = {**_SAMPLING, **_ENDS, **_GRAMMARS, **_TOLD}

CHAT: Neutral = {
    **_SHARED,
    "logprobs": (None, False),
    "top_logprobs": (None, 0),
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "prediction": (None,),
    "web_search_options": (None,),
    "chat_template": (None,),
    "chat_template_kwargs": (None, {}),
    "documents": (None, []),
    "echo": (None, False),
    "best_of": (None, 1),
    "verbosity": (None, "medium"),
    "enable_thinking": (None,),
    "separate_reasoning": (None, True),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "add_special_tokens": (None, False),
    "mm_processor_kwargs": (None, {}),
}
"""For chat completions."""

TEXT: Neutral = {
    **_SHARED,
    "logprobs": (None,),
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "tools": (None, []),
    "reasoning_effort": (None, "none"),
    "max_completion_tokens": (None,),
    "add_special_tokens": (None, False),
}
"""For text completions."""

HARMLESS = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "parallel_tool_calls",
        "prompt_cache_key",
        "prompt_cache_retention",
        "safety_identifier",
    }
)
"""Fields of OpenAI's API that may be ignored without a word."""


def asks_nothing(value: Any, neutral: tuple[Any, ...]) -> bool:
    """Whether a parameter's value is one of its neutral ones; true is no 1 here."""
    return any(isinstance(value, bool) == isinstance(n, bool) and value == n for n in neutral)
