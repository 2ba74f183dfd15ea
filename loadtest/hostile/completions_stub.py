"""An OpenAI-compatible server as the engine sees it, drawing by hash: vLLM's answers, at once."""

from __future__ import annotations

import json
import math
from typing import Any

from loadtest.hostile.sglang_stub import Stub, share

NAME = "stub"
LOGPROB = math.log(0.5)


class CompletionsStub(Stub):
    """Answers ``/v1/completions``, and names one model. ``without``: fields that its answers lack;
    ``seeds``: whether it heeds them; ``trims``: what stops it is not in its text; ``grammar``: the
    field by which it holds to a schema that allows one thing, None: by none."""

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

    def _completed(self, asked: dict[str, Any]) -> dict[str, Any]:
        prompt = asked["prompt"]
        prompts = prompt if isinstance(prompt[0], list) else [prompt]
        choices = [self._choice(asked, ids) | {"index": at} for at, ids in enumerate(prompts)]
        usage: dict[str, Any] = {
            "prompt_tokens": len(prompt),
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        usage["completion_tokens"] = sum(choice.pop("drawn") for choice in choices)
        return {"choices": choices, "usage": usage}

    def _only(self, held: dict[str, Any]) -> list[int]:
        """The one thing that a schema allows, a byte a token, and the end."""
        schema = held["json"] if "json" in held else held["json_schema"]["schema"]
        said = json.dumps(schema["const"]).encode()
        return [*(self._pieces.index(bytes([byte])) for byte in said), self._end]

    def _choice(self, asked: dict[str, Any], ids: list[int]) -> dict[str, Any]:
        self._draws += 1
        seed = asked.get("seed", 0) if self.seeds else self._draws
        drawn, stopped = self.draw(ids, seed, asked["max_tokens"], asked.get("stop", ()))
        if self.grammar is not None and self.grammar in asked:
            drawn, stopped = self._only(asked[self.grammar]), True
        tops = [{f"token_id:{token}": LOGPROB} for token in drawn]
        if verdicts := asked.get("logprob_token_ids"):
            good = min(max(share(ids), 1e-6), 1 - 1e-6)
            odds = [math.log(good), math.log(1 - good)]
            tops[0] |= {f"token_id:{t}": p for t, p in zip(verdicts, odds, strict=True)}
        told = drawn[:-1] if self.trims and stopped else drawn
        choice = {
            "drawn": len(drawn),
            "text": b"".join(self._pieces[token] for token in told).decode(errors="replace"),
            "token_ids": drawn,
            "finish_reason": "stop" if stopped else "length",
            "logprobs": {
                "tokens": [f"token_id:{token}" for token in drawn],
                "token_logprobs": [LOGPROB] * len(drawn),
                "top_logprobs": tops,
            },
            "prompt_logprobs": [None]
            + [
                {str(ids[at]): {"logprob": -1.0 - share(ids[: at + 1])}}
                for at in range(1, len(ids))
            ],
        }
        return {name: value for name, value in choice.items() if name not in self.without}
