"""openai for Python: models, chat, completions, responses, whole and streamed. Prints JSON."""

import json
import sys

from openai import OpenAI

url, question = sys.argv[1:]
client = OpenAI(base_url=url, api_key="any")
short = {"model": "sprig", "seed": 3}
request = short | {"messages": [{"role": "user", "content": question}], "max_tokens": 24}
search = {"search": {"policy": "rebase", "width": 2, "seed": 11}}

whole = client.chat.completions.create(**request)
chunks = list(client.chat.completions.create(**request, stream=True))
completion = client.completions.create(**short, prompt=question, max_tokens=8)
pieces = list(client.completions.create(**short, prompt=question, max_tokens=8, stream=True))
response_request = {"model": "sprig", "input": question, "max_output_tokens": 24}
response = client.responses.create(**response_request, extra_body={"seed": 3})
events = list(client.responses.create(**response_request, stream=True, extra_body={"seed": 3}))
search_response = client.responses.create(model="sprig", input=question, extra_body=search)
print(
    json.dumps(
        {
            "models": [model.id for model in client.models.list()],
            "whole": whole.choices[0].message.content,
            "streamed": "".join(chunk.choices[0].delta.content or "" for chunk in chunks),
            "completion": completion.choices[0].text,
            "completion_streamed": "".join(piece.choices[0].text for piece in pieces),
            "response": response.output_text,
            "response_status": response.status,
            "response_streamed": "".join(
                event.delta for event in events if event.type == "response.output_text.delta"
            ),
            "last_event": events[-1].type,
            "search": search_response.output_text,
        }
    )
)
