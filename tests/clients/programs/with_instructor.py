"""instructor: a reply without a schema, and typed ones by tools and by JSON. Prints JSON."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel, ConfigDict


class Answer(BaseModel):
    """An answer, and nothing else."""

    model_config = ConfigDict(extra="forbid")

    first: int
    last: bool


url, question = sys.argv[1:]
request = {"model": "sprig", "messages": [{"role": "user", "content": question}], "seed": 3}
replies = {}
for mode in (instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA):
    client = instructor.from_openai(OpenAI(base_url=url, api_key="any"), mode=mode)
    replies[mode.name] = client.create(response_model=Answer, max_retries=0, **request).model_dump()
whole = client.create(response_model=None, max_tokens=24, **request)
print(json.dumps(replies | {"whole": whole.choices[0].message.content}))
