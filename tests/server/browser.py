"""Chromium for tests, and a server on a socket that it can visit."""

from __future__ import annotations

import asyncio
import os
import shutil
import subprocess
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
import uvicorn
from playwright.sync_api import Browser, Page, sync_playwright

from search.engine import Branch, KvMoved, Sampling, Step
from server.app import create_app
from server.lifecycle import listen
from server.service import create_service
from server.settings import Settings
from tests.search.scripted_engine import ScriptedEngine
from tests.server.conftest import PlainText

NAMES = ("chromium", "chromium-browser", "google-chrome", "chrome")
INSTALL = ["apt-get", "install", "-y", "--no-install-recommends", "chromium"]
PATIENCE_MS = 60_000
SCRIPT_ERRORS: list[str] = []
"""Errors of all pages visited since a test last cleared the list."""


class GatedEngine(ScriptedEngine):
    """Draws a round only when the test allows it, and reports KV in turn: in one round half of node
    1's step is evicted, in the next it is back."""

    def __init__(self) -> None:
        super().__init__()
        self.go = threading.Semaphore(0)
        self.rounds = 0
        self.prompt = 0

    def allow(self, rounds: int = 1_000) -> None:
        """Allow this number of rounds."""
        self.go.release(rounds)

    async def expand(self, tree: str, branches: Sequence[Branch], sampling: Sampling) -> list[Step]:
        """Draw the scripted steps once a round is allowed."""
        await asyncio.to_thread(self.go.acquire)
        self.rounds += 1
        self.prompt = len(branches[0].tokens) if self.rounds == 1 else self.prompt
        return await super().expand(tree, branches, sampling)

    def kv_moved(self, tree: str) -> KvMoved | None:
        """Report half of node 1's step as cached in odd rounds, all of it in even ones."""
        share = 4 if self.rounds % 2 else 100
        return KvMoved(50 * self.rounds, 1_000, {1: self.prompt + share})


@contextmanager
def serving(engine: ScriptedEngine, **settings: object) -> Iterator[str]:
    """Run a server over a scripted engine in a thread; yield its URL."""
    service = create_service(Settings(**settings), engine, PlainText())
    config = uvicorn.Config(create_app(service), log_level="warning", lifespan="on")
    server = uvicorn.Server(config)
    listener = listen("127.0.0.1", 0)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/"
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def find_chromium() -> str:
    """Return the browser's path; install it if allowed, else skip the test."""
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None and os.geteuid() == 0 and shutil.which("apt-get"):
        subprocess.run(INSTALL, capture_output=True, check=False)
        executable = shutil.which("chromium")
    if executable is None:
        pytest.skip("no Chromium is there, and it cannot be installed: not root, or no apt-get")
    return executable


@contextmanager
def chromium() -> Iterator[Browser]:
    """Yield a browser without a window."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox"], timeout=2 * PATIENCE_MS
        )
        yield browser
        browser.close()


def visit(browser: Browser, url: str, *, width: int = 1280, scheme: str = "light") -> Page:
    """Open the playground and wait until it is ready; script errors go to ``SCRIPT_ERRORS``."""
    page = browser.new_page(
        viewport={"width": width, "height": 900},
        color_scheme=scheme,  # type: ignore[arg-type]
        reduced_motion="reduce",
    )
    page.on("pageerror", lambda error: SCRIPT_ERRORS.append(str(error)))
    page.set_default_timeout(PATIENCE_MS)
    page.goto(url)
    page.locator("#policy option").first.wait_for(state="attached")
    return page


def submit(page: Page, question: str = "What?", **dials: str) -> None:
    """Fill in the form and press the button."""
    page.fill("#question", question)
    for name, value in dials.items():
        if name in ("policy", "other"):
            page.select_option(f"#{name}", value)
        else:
            page.fill(f"#{name}", value)
    page.click("#run")


def wait_for_done(page: Page, panes: int = 1) -> None:
    """Wait until ``panes`` panes show a search that is done."""
    page.locator(".pane[data-state=done]").nth(panes - 1).wait_for()
