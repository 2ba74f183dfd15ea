"""The part of Kubernetes' API that Helm installs a chart with: discovery, creating objects."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import yaml

VERSIONS = {"kind": "APIVersions", "versions": ["v1"]}
VERSION = {"major": "1", "minor": "34", "gitVersion": "v1.34.0"}
KINDS = {
    "v1": ("Secret", "Service", "ConfigMap", "Namespace", "Pod"),
    "apps/v1": ("Deployment", "StatefulSet"),
    "policy/v1": ("PodDisruptionBudget",),
    "autoscaling/v2": ("HorizontalPodAutoscaler",),
    "networking.k8s.io/v1": ("Ingress", "NetworkPolicy"),
    "monitoring.coreos.com/v1": ("ServiceMonitor",),
}


def plural(kind: str) -> str:
    """The plural of a kind, as in a URL's path."""
    lower = kind.lower()
    if lower.endswith("y"):
        return lower[:-1] + "ies"
    return lower + ("es" if lower.endswith("s") else "s")


def _resources(group: str) -> dict[str, Any]:
    verbs = ["create", "delete", "get", "list", "patch", "update"]
    resources = [
        {"name": plural(kind), "kind": kind, "namespaced": kind != "Namespace", "verbs": verbs}
        for kind in KINDS[group]
    ]
    return {"kind": "APIResourceList", "groupVersion": group, "resources": resources}


def _groups() -> dict[str, Any]:
    groups = []
    for name in KINDS:
        if "/" in name:
            version = {"groupVersion": name, "version": name.partition("/")[2]}
            group = {"name": name.partition("/")[0], "versions": [version]}
            groups.append(group | {"preferredVersion": version})
    return {"kind": "APIGroupList", "apiVersion": "v1", "groups": groups}


class Answers(BaseHTTPRequestHandler):
    """Answer discovery as a cluster does and store created objects; all else is 404."""

    protocol_version = "HTTP/1.1"
    created: list[dict[str, Any]]

    def do_GET(self) -> None:
        """Answer with discovery, an empty list, or 404."""
        path, _, query = self.path.partition("?")
        group = path.removeprefix("/apis/").removeprefix("/api/")
        documents = {"/version": VERSION, "/api": VERSIONS, "/apis": _groups()}
        error = {"kind": "Status", "apiVersion": "v1", "status": "Failure", "reason": "NotFound"}
        if path in documents:
            self._say(200, documents[path])
        elif group in KINDS:
            self._say(200, _resources(group))
        elif "labelSelector" in query:
            self._say(200, {"kind": "List", "apiVersion": "v1", "items": []})
        else:
            self._say(404, error | {"code": 404})

    def do_POST(self) -> None:
        """Store an object. Helm's own record of the release is not JSON and is not stored."""
        body = self._body()
        if self._json():
            self.created.append(json.loads(body))
        self._send(201, body)

    def do_PUT(self) -> None:
        """Echo the object."""
        self._send(200, self._body())

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _body(self) -> bytes:
        return self.rfile.read(int(self.headers["content-length"]))

    def _json(self) -> bool:
        return self.headers.get("content-type", "application/json") == "application/json"

    def _say(self, status: int, document: dict[str, Any]) -> None:
        self._send(status, json.dumps(document).encode())

    def _send(self, status: int, body: bytes) -> None:
        kind = "application/json" if self._json() else self.headers["content-type"]
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


class KubeApi:
    """A server on a free port of this machine; ``created`` lists the created objects in order."""

    def __init__(self) -> None:
        self.created: list[dict[str, Any]] = []
        handler = type("OwnAnswers", (Answers,), {"created": self.created})
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    @property
    def kubeconfig(self) -> str:
        """A kubeconfig file's text that points to this server."""
        cluster = {"server": f"http://127.0.0.1:{self.server.server_port}"}
        context = {"cluster": "here", "user": "me", "namespace": "default"}
        return yaml.safe_dump(
            {
                "apiVersion": "v1",
                "kind": "Config",
                "current-context": "here",
                "clusters": [{"name": "here", "cluster": cluster}],
                "contexts": [{"name": "here", "context": context}],
                "users": [{"name": "me", "user": {"token": "any"}}],
            }
        )

    def close(self) -> None:
        """Stop the server."""
        self.server.shutdown()
        self.server.server_close()
