"""LangChain's three ways to typed output, and a tool that is bound. Prints JSON."""

import json
import sys
from contextlib import suppress

import openai
from langchain_openai import ChatOpenAI
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An answer, and nothing else."""

    model_config = ConfigDict(extra="forbid")

    first: int
    last: bool


url, question = sys.argv[1:]
model = ChatOpenAI(base_url=url, api_key="any", model="sprig", seed=3)
typed = {
    method: model.with_structured_output(Answer, method=method)
    for method in ("json_schema", "function_calling")
}
output = {name: runnable.invoke(question).model_dump() for name, runnable in typed.items()}
for seed in range(50):  # the toy model seldom ends an arbitrary object
    mode = ChatOpenAI(base_url=url, api_key="any", model="sprig", seed=seed, max_tokens=64)
    with suppress(openai.LengthFinishReasonError):
        object_ = mode.with_structured_output(None, method="json_mode").invoke(question)
        break
output["json_mode"] = isinstance(object_, dict)
bound = model.bind_tools([Answer], tool_choice="any")
output["bound"] = bound.invoke(question).tool_calls[0]["args"]
total = None
for piece in bound.stream(question):
    total = piece if total is None else total + piece
output["streamed"] = total.tool_calls[0]["args"]
print(json.dumps(output))
