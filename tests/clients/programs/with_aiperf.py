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
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    assert process.returncode == 0, process.stdout[-2000:] + process.stderr[-2000:]
    [report_file] = Path(folder).rglob("profile_export_aiperf.json")
    report = json.loads(report_file.read_text())
print(
    json.dumps(
        {
            "requests": report["request_count"]["avg"],
            "errors": (report.get("error_request_count") or {"avg": 0})["avg"],
            "first_token": report["time_to_first_token"]["avg"] > 0,
        }
    )
)
