"""openai for Python: ``.parse`` over chat and responses, tools by name, plain and searched. Prints
JSON."""

import json
import sys

import openai
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An answer, and nothing else."""

    model_config = ConfigDict(extra="forbid")

    first: int
    last: bool


url, question = sys.argv[1:]
client = OpenAI(base_url=url, api_key="any")
request = {"model": "sprig", "messages": [{"role": "user", "content": question}], "seed": 3}
search = {"search": {"policy": "rebase", "width": 2, "seed": 11}}
tool = openai.pydantic_function_tool(Answer)
tool_choice = {"type": "function", "function": {"name": "Answer"}}
common = {**request, "tools": [tool], "tool_choice": tool_choice}

parsed = client.chat.completions.parse(**request, response_format=Answer)
parsed_search = client.chat.completions.parse(**request, response_format=Answer, extra_body=search)
response = client.responses.parse(model="sprig", input=question, text_format=Answer)
called = client.chat.completions.parse(**common).choices[0]
with client.chat.completions.stream(**common) as stream:
    streamed = stream.get_final_completion().choices[0]
searched = client.chat.completions.parse(**common, extra_body=search).choices[0]
function = {"type": "function", "name": "Answer", "parameters": Answer.model_json_schema()}
items = client.responses.create(
    model="sprig",
    input=question,
    tools=[function],
    tool_choice={"type": "function", "name": "Answer"},
).output
print(
    json.dumps(
        {
            "parsed": parsed.choices[0].message.parsed.model_dump(),
            "searched": parsed_search.choices[0].message.parsed.model_dump(),
            "response": response.output_parsed.model_dump(),
            "called": called.message.tool_calls[0].function.parsed_arguments.model_dump(),
            "finish_reason": called.finish_reason,
            "streamed": streamed.message.tool_calls[0].function.parsed_arguments.model_dump(),
            "searched_call": searched.message.tool_calls[0].function.parsed_arguments.model_dump(),
            "response_call": Answer.model_validate_json(items[-1].arguments).model_dump(),
        }
    )
)
