"""Searches and engine options for real SGLang servers of the bundled models."""

from __future__ import annotations

import asyncio
from dataclasses import replace

from models.bundled import SPRIG_FOLDER
from runtime.sglang.launched_server import LaunchedServer
from runtime.sglang.sglang_options import SglangOptions
from runtime.text import Text
from search.controller import search
from search.engine import Engine
from search.outcome import Outcome
from search.problem import Problem
from search.spec import SearchSpec

POLICY, PRM = SPRIG_FOLDER / "policy", SPRIG_FOLDER / "prm"
TEXT = Text(POLICY)
QUESTIONS = ("Use 4 9 10 13 to make 24.", "Use 1 5 5 5 to make 24.", "Use 3 3 8 8 to make 24.")
SECONDS = 60.0


def prompt_of(question: str) -> tuple[int, ...]:
    """The token ids of a question's chat prompt."""
    return tuple(TEXT.encode_chat([{"role": "user", "content": question}]))


def options(
    policies: list[LaunchedServer], rewards: list[LaunchedServer], **changes: object
) -> SglangOptions:
    """Engine options for these servers, with long time limits since all share the CPU."""
    defaults = SglangOptions(
        policy=POLICY,
        policy_urls=tuple(server.url for server in policies),
        prm=PRM if rewards else None,
        reward_urls=tuple(server.url for server in rewards),
        reward_format="math-shepherd" if rewards else "none",
        connect_seconds=SECONDS,
        probe_seconds=SECONDS,
    )
    return replace(defaults, **changes)  # type: ignore[arg-type]


async def grow(engine: Engine, question: str, tree: str = "", **spec: object) -> Outcome:
    """Run one search; ``spec``: fields of the SearchSpec."""
    search_spec = SearchSpec.model_validate({"policy": "rebase", "width": 4, "seed": 3} | spec)
    return await search(
        Problem(prompt_of(question), question, "\n\n"),
        search_spec,
        engine,
        tree_id=tree or f"{question}/{spec}",
        answer_of=lambda text: text.rpartition("answer is ")[2].strip(". \n") or None,
        clock=asyncio.get_running_loop().time,
        context_tokens=engine.capabilities.context_tokens,
    )
