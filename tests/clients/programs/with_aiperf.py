"""AIPerf: eight streamed chats, two at a time, by the served model's tokenizer. Prints JSON."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

MODEL = Path(__file__).parents[3] / "models" / "sprig" / "policy"
url, _ = sys.argv[1:]
with tempfile.TemporaryDirectory() as folder:
    command = [Path(sys.executable).with_name("aiperf"), "profile", "--model", "sprig"]
    command += ["--url", url.removesuffix("/v1"), "--endpoint-type", "chat", "--streaming"]
    command += ["--request-count", "8", "--concurrency", "2", "--tokenizer", MODEL]
    command += ["--synthetic-input-tokens-mean", "16", "--output-tokens-mean", "16"]
    command += ["--artifact-dir", folder, "--ui", "none"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    [told] = Path(folder).rglob("profile_export_aiperf.json")
    found = json.loads(told.read_text())
print(
    json.dumps(
        {
            "requests": found["request_count"]["avg"],
            "errors": (found.get("error_request_count") or {"avg": 0})["avg"],
            "first_token": found["time_to_first_token"]["avg"] > 0,
        }
    )
)
