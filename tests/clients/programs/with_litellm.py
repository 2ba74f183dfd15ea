"""LiteLLM's ``openai/`` provider: whole, streamed, and how it maps errors. Prints JSON."""

import json
import sys

import litellm

litellm.suppress_debug_info = True
url, question = sys.argv[1:]
common = {
    "model": "openai/sprig",
    "api_base": url,
    "api_key": "any",
    "messages": [{"role": "user", "content": question}],
    "num_retries": 0,
}
search = {"policy": "rebase", "width": 2, "seed": 11}
whole = litellm.completion(**common, seed=3, max_tokens=24)
pieces = list(
    litellm.completion(
        **common, seed=3, max_tokens=24, stream=True, stream_options={"include_usage": True}
    )
)
search_reply = litellm.completion(**common, search=search)
errors = {}
for name, change in {
    "model": {"model": "openai/oak"},
    "field": {"search": {"wdith": 2}},
    "context": {"messages": [{"role": "user", "content": question * 400}]},
}.items():
    try:
        litellm.completion(**{**common, **change})
    except (litellm.BadRequestError, litellm.NotFoundError) as error:
        errors[name] = type(error).__name__
print(
    json.dumps(
        {
            "whole": whole.choices[0].message.content,
            "streamed": "".join(p.choices[0].delta.content or "" for p in pieces if p.choices),
            "usage": [whole.usage.completion_tokens, pieces[-1].usage.completion_tokens],
            "search": search_reply.choices[0].message.content,
            "errors": errors,
        }
    )
)
