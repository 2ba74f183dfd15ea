"""LiteLLM: a schema and a tool that must be called. Prints JSON."""

import json
import sys

import litellm
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An answer, and nothing else."""

    model_config = ConfigDict(extra="forbid")

    first: int
    last: bool


litellm.suppress_debug_info = True
url, question = sys.argv[1:]
common = {
    "model": "openai/sprig",
    "api_base": url,
    "api_key": "any",
    "messages": [{"role": "user", "content": question}],
    "num_retries": 0,
    "seed": 3,
}
tool = {"name": "answer", "parameters": Answer.model_json_schema()}
typed = litellm.completion(**common, response_format=Answer).choices[0]
called = litellm.completion(
    **common, tools=[{"type": "function", "function": tool}], tool_choice="required"
).choices[0]
print(
    json.dumps(
        {
            "typed": Answer.model_validate_json(typed.message.content).model_dump(),
            "called": json.loads(called.message.tool_calls[0].function.arguments),
            "finish_reason": called.finish_reason,
        }
    )
)
