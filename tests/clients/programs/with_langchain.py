"""LangChain's ChatOpenAI and OpenAI: invoke, stream, batch, errors. Prints the replies as JSON."""

import json
import sys

import openai
from langchain_openai import ChatOpenAI, OpenAI

url, question = sys.argv[1:]
search = {"search": {"policy": "rebase", "width": 2, "seed": 11}}
plain = ChatOpenAI(base_url=url, api_key="any", model="sprig", max_tokens=24, seed=3)
searching = ChatOpenAI(base_url=url, api_key="any", model="sprig", extra_body=search)
with_usage = ChatOpenAI(base_url=url, api_key="any", model="sprig", seed=3, stream_usage=True)

whole = plain.invoke(question)
pieces = list(plain.stream(question))
search_reply = searching.invoke(question)
streamed = list(searching.stream(question))
texts = OpenAI(base_url=url, api_key="any", model="sprig", max_tokens=8, seed=3, temperature=1)
generations = texts.generate([question, "13 - 10 = 3"]).generations
total = None
for piece in with_usage.stream(question, max_tokens=24):
    total = piece if total is None else total + piece
try:
    plain.bind_tools([{"type": "function", "function": {"name": "f", "parameters": {}}}]).invoke(
        question
    )
    refused_param = None
except openai.BadRequestError as error:
    refused_param = error.param
print(
    json.dumps(
        {
            "whole": whole.content,
            "streamed": "".join(str(piece.content) for piece in pieces),
            "finish_reason": whole.response_metadata["finish_reason"],
            "usage": whole.usage_metadata,
            "streamed_usage": total.usage_metadata,
            "search": search_reply.content,
            "search_streamed": "".join(str(piece.content) for piece in streamed),
            "batch": [reply.content for reply in plain.batch([question] * 3)],
            "listed": [replies[0].text for replies in generations],
            "apart": [texts.invoke(prompt) for prompt in (question, "13 - 10 = 3")],
            "refused": refused_param,
        }
    )
)
