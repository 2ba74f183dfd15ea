"""A verifier behind HTTP, run as a process: prints its port, answers until it is killed.

The first step of the first path may name a fault: ``status``, ``text``, ``shape``, ``hang``,
``drip``, ``huge``.
"""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Answering(BaseHTTPRequestHandler):
    """Scores a path 1 less 0.1 for each step; the bearer token must be ``s3cret``."""

    def do_POST(self) -> None:
        """Send the scores, or the fault named by the first step."""
        inputs = json.loads(self.rfile.read(int(self.headers["content-length"])))["inputs"]
        fault = inputs[0]["steps"][0]
        if self.headers["authorization"] != "Bearer s3cret":
            return self._say(b"{}", 401)
        if fault == "hang":
            threading.Event().wait()
        if fault == "drip":
            self._say(b"", 200, length=1000)
            while True:
                self.wfile.write(b" ")
                threading.Event().wait(0.05)
        scores = [1 - len(judged["steps"]) / 10 for judged in inputs]
        bodies = {"text": b"good", "shape": b"[1]", "huge": b" " * (2 << 20)}
        body = bodies.get(fault, json.dumps({"scores": scores}).encode())
        return self._say(body, 503 if fault == "status" else 200)

    def _say(self, body: bytes, status: int, length: int | None = None) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(body) if length is None else length))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        """Log nothing."""


if __name__ == "__main__":
    serving = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    serving.daemon_threads = True
    print(serving.server_port, flush=True)
    serving.serve_forever()
