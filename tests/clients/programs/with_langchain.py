"""LangChain's ChatOpenAI and OpenAI: invoke, stream, batch, errors. Prints what it got as JSON."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI, OpenAI

url, question = sys.argv[1:]
search = {"search": {"policy": "rebase", "width": 2, "seed": 11}}
plain = ChatOpenAI(base_url=url, api_key="any", model="sprig", max_tokens=24, seed=3)
searching = ChatOpenAI(base_url=url, api_key="any", model="sprig", extra_body=search)
counted = ChatOpenAI(base_url=url, api_key="any", model="sprig", seed=3, stream_usage=True)

whole = plain.invoke(question)
pieces = list(plain.stream(question))
found = searching.invoke(question)
streamed = list(searching.stream(question))
texts = OpenAI(base_url=url, api_key="any", model="sprig", max_tokens=8, seed=3, temperature=1)
listed = texts.generate([question, "13 - 10 = 3"]).generations
total = None
for piece in counted.stream(question, max_tokens=24):
    total = piece if total is None else total + piece
try:
    plain.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke(
        question
    )
    refused = None
except openai.BadRequestError as error:
    refused = error.param
print(
    json.dumps(
        {
            "whole": whole.content,
            "streamed": "".join(str(piece.content) for piece in pieces),
            "finish_reason": whole.response_metadata["finish_reason"],
            "usage": whole.usage_metadata,
            "streamed_usage": total.usage_metadata,
            "search": found.content,
            "search_streamed": "".join(str(piece.content) for piece in streamed),
            "batch": [reply.content for reply in plain.batch([question] * 3)],
            "listed": [replies[0].text for replies in listed],
            "apart": [texts.invoke(prompt) for prompt in (question, "13 - 10 = 3")],
            "refused": refused,
        }
    )
)
