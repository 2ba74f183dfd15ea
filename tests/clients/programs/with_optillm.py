"""optillm in front: its proxy asks this server several times for each reply. Prints JSON."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

from openai import OpenAI

url, question = sys.argv[1:]
with socket.socket() as free:
    free.bind(("127.0.0.1", 0))
    port = free.getsockname()[1]
command = [Path(sys.executable).with_name("optillm"), "--base-url", url]
command += ["--host", "127.0.0.1", "--port", str(port), "--n", "2"]
environment = os.environ | {"OPENAI_API_KEY": "any"}
proxy = subprocess.Popen(
    command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
)
try:
    for line in proxy.stdout:
        if "Running on" in line:
            break
    client = OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", max_retries=0)
    replies = {}
    for approach in ("none", "bon", "self_consistency"):
        reply = client.chat.completions.create(
            model=f"{approach}-sprig",
            messages=[{"role": "user", "content": question}],
            max_tokens=40,
        )
        replies[approach] = reply.choices[0].message.content
finally:
    proxy.terminate()
    proxy.wait()
print(json.dumps(replies))
