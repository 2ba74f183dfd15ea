"""instructor: what it sends without a schema, and its mode that only asks in words. Prints JSON."""

import json
import sys

import instructor
from openai import OpenAI
from pydantic import BaseModel


class Answer(BaseModel):
    """An answer of one number."""

    value: int


url, question = sys.argv[1:]
client = instructor.from_openai(OpenAI(base_url=url, api_key="any"), mode=instructor.Mode.MD_JSON)
asked = {"model": "sprig", "messages": [{"role": "user", "content": question}], "seed": 3}
whole = client.create(response_model=None, max_tokens=24, **asked)
print(json.dumps({"whole": whole.choices[0].message.content}))
