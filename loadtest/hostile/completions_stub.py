"""A stub of an OpenAI-compatible server: it answers at once, as vLLM would, drawing by hash."""

from __future__ import annotations

import json
import math
from typing import Any

from loadtest.hostile.sglang_stub import Stub, share

NAME = "stub"
LOGPROB = math.log(0.5)


class CompletionsStub(Stub):
    """Answers ``/v1/completions``, and names one model. ``without``: fields that its answers lack;
    ``seeds``: whether it heeds them; ``trims``: its texts end before the stop string; ``grammar``:
    the request's field with a schema that allows one value; None: schemas are ignored."""

    work = "/v1/completions"
    without: tuple[str, ...] = ()
    seeds = True
    trims = False
    grammar: str | None = None
    models: tuple[str, ...] = (NAME,)
    _draws = 0

    def _said(self, path: str, body: bytes) -> list[bytes]:
        match path:
            case "/v1/completions":
                return [json.dumps(self._completed(json.loads(body))).encode()]
            case "/v1/models":
                listed = [{"id": name, "max_model_len": 1024} for name in self.models]
                return [json.dumps({"data": listed}).encode()]
            case "/metrics":
                return []
            case _:
                return [b"{}"]

    def _completed(self, request: dict[str, Any]) -> dict[str, Any]:
        prompt = request["prompt"]
        prompts = prompt if isinstance(prompt[0], list) else [prompt]
        choices = [self._choice(request, ids) | {"index": at} for at, ids in enumerate(prompts)]
        usage: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        usage["completion_tokens"] = sum(choice.pop("drawn") for choice in choices)
        return {"choices": choices, "usage": usage}

    def _only(self, constraint: dict[str, Any]) -> list[int]:
        """Tokens of the one value that a schema allows, one per byte, and the end token."""
        schema = constraint["json"] if "json" in constraint else constraint["json_schema"]["schema"]
        text = json.dumps(schema["const"]).encode()
        return [*(self._pieces.index(bytes([byte])) for byte in text), self._end]

    def _choice(self, request: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        self._draws += 1
        seed = request.get("seed", 0) if self.seeds else self._draws
        tokens, stopped = self.draw(ids, seed, request["max_tokens"], request.get("stop", ()))
        if self.grammar is not None and self.grammar in request:
            tokens, stopped = self._only(request[self.grammar]), True
        tops = [{f"token_id:{token}": LOGPROB} for token in tokens]
        if verdicts := request.get("logprob_token_ids"):
            good = min(max(share(ids), 1e-6), 1 - 1e-6)
            odds = [math.log(good), math.log(1 - good)]
            tops[0] |= {f"token_id:{t}": p for t, p in zip(verdicts, odds, strict=True)}
        visible = tokens[:-1] if self.trims and stopped else tokens
        choice = {
            "drawn": len(tokens),
            "text": b"".join(self._pieces[token] for token in visible).decode(errors="replace"),
            "token_ids": tokens,
            "finish_reason": "stop" if stopped else "length",
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in tokens],
                "token_logprobs": [LOGPROB] * len(tokens),
                "top_logprobs": tops,
            },
            "prompt_logprobs": [None]
            + [
                {str(ids[at]): {"logprob": -1.0 - share(ids[: at + 1])}}
                for at in range(1, len(ids))
            ],
        }
        return {name: value for name, value in choice.items() if name not in self.without}
