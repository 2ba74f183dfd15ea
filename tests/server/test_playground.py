"""The playground in a browser: a person's way through it, by mouse, keyboard and screen reader."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page

from tests.server.browser import (
    SCRIPT_ERRORS,
    HeldEngine,
    chromium,
    done,
    parsed,
    serving,
    visit,
)

pytestmark = pytest.mark.slow

DIALS = {"policy": "rebase", "width": "6", "seed": "4"}
NODES = 2_000
SERIOUS = ("serious", "critical")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file."""
    with chromium() as browser:
        yield browser


@pytest.fixture(autouse=True)
def no_script_fails() -> Iterator[None]:
    """Nobody sees an error in the page's own scripts; it fails the test."""
    SCRIPT_ERRORS.clear()
    yield
    assert SCRIPT_ERRORS == []


@pytest.fixture
def engine() -> HeldEngine:
    """An engine that waits for the test."""
    return HeldEngine()


@pytest.fixture
def url(engine: HeldEngine) -> Iterator[str]:
    """A server for one test; nothing waits when it ends."""
    with serving(engine) as url:
        yield url
        engine.let()


def faults(page: Page) -> list[str]:
    """What axe finds that is serious, by rule and element."""
    found = Axe().run(page).response["violations"]
    return [
        f"{rule['id']}: {node['html']}"
        for rule in found
        if rule["impact"] in SERIOUS
        for node in rule["nodes"]
    ]


def test_nodes_appear_before_the_answer(
    browser: Browser, engine: HeldEngine, url: str, tmp_path: Path
) -> None:
    """Type, run, watch, click a step, branch from it, export the tree and open it again."""
    page = visit(browser, url)
    pane = page.locator(".pane")
    engine.let(1)
    parsed(page, **DIALS)
    page.locator('.pane[data-state="growing"][data-nodes="6"]').wait_for()
    assert not page.locator(".answers").is_visible()
    assert page.locator("#stop").is_visible()
    engine.let()
    done(page)
    assert int(pane.get_attribute("data-nodes") or 0) > 6
    assert "votes" in page.locator(".answers").inner_text()
    assert page.locator(".reply pre").inner_text().count("The answer is") == 1
    assert "active" in page.locator(".kv figcaption").inner_text()

    canvas = page.locator("canvas.tree")
    canvas.focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    facts = page.locator(".details").inner_text()
    for word in ("Reward", "Log-probability", "Entropy", "Tokens", "KV", "Round"):
        assert word in facts
    page.get_by_role("button", name="Branch from here").click()
    page.locator(".crumbs").get_by_text("branch from step").wait_for()
    done(page)
    page.locator(".crumbs").get_by_text("whole search").click()

    with page.expect_download() as download:
        page.get_by_role("button", name="Export the tree as JSON").click()
    kept = tmp_path / "tree.json"
    download.value.save_as(kept)
    document = json.loads(kept.read_text())
    assert document["tree"]["version"] == 1
    assert len(document["tree"]["nodes"]) == int(pane.get_attribute("data-nodes") or 0)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export the tree as SVG").click()
    assert download.value.path().read_text().startswith("<svg xmlns=")

    before = (pane.get_attribute("data-nodes"), page.locator(".answers").inner_text())
    fresh = visit(browser, url)
    fresh.set_input_files("#file", kept)
    done(fresh)
    after = (
        fresh.locator(".pane").get_attribute("data-nodes"),
        fresh.locator(".answers").inner_text(),
    )
    assert after == before
    assert fresh.locator(".kv figcaption").is_visible()
    assert fresh.input_value("#question") == "What?"


def test_a_click_selects_and_kv_is_told_of_each_step(
    browser: Browser, engine: HeldEngine, url: str
) -> None:
    """Half of step 1 is evicted in one round and back in the next; the outline says so too."""
    page = visit(browser, url)
    engine.let(1)
    parsed(page, **DIALS)
    page.locator('.pane[data-nodes="6"]').wait_for()
    page.get_by_text("The tree as text").click()
    first = page.locator('[role="treeitem"][data-node="1"]')
    first.click()
    page.locator(".details").get_by_text("4 of").wait_for()
    assert "KV partly evicted" in (first.get_attribute("aria-label") or "")
    engine.let(1)
    page.locator(".details").get_by_text("just rehydrated").wait_for()
    box = page.locator("canvas.tree").bounding_box()
    assert box is not None
    page.locator("canvas.tree").click(position={"x": 26, "y": box["height"] / 2})
    page.locator(".details").get_by_text("The question").wait_for()


def test_two_policies_side_by_side(browser: Browser, engine: HeldEngine, url: str) -> None:
    """The same question and seed; on a phone one below the other, and nothing overflows."""
    engine.let()
    page = visit(browser, url)
    page.check("#compare")
    parsed(page, **DIALS, other="beam")
    done(page, 2)
    assert page.locator(".pane h2").all_inner_texts() == ["rebase 6, seed 4", "beam 6, seed 4"]
    left, right = (page.locator(".pane").nth(i).bounding_box() for i in (0, 1))
    assert left is not None
    assert right is not None
    assert left["y"] == right["y"]
    page.set_viewport_size({"width": 390, "height": 844})
    left, right = (page.locator(".pane").nth(i).bounding_box() for i in (0, 1))
    assert left is not None
    assert right is not None
    assert left["x"] == right["x"]
    assert left["width"] <= 390


def test_the_keyboard_walks_the_tree(browser: Browser, engine: HeldEngine, url: str) -> None:
    """Right to a child, left to the parent, down and up within a level; a live region speaks."""
    engine.let()
    page = visit(browser, url)
    parsed(page, **DIALS)
    done(page)
    page.locator("canvas.tree").focus()
    heard = []
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "End"):
        page.keyboard.press(key)
        heard.append(page.locator("#live").inner_text())
    assert heard[0] == heard[4] == "Question: What?"
    assert heard[1] == heard[3] != heard[2]
    assert "chosen" in heard[5]
    page.get_by_text("The tree as text").click()
    page.locator('[role="treeitem"][tabindex="0"]').focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    item = page.locator('[role="treeitem"]:focus')
    assert item.get_attribute("data-node") == "1"
    assert item.get_attribute("aria-selected") == "true"


def test_what_goes_wrong_is_said_in_plain_words(browser: Browser, engine: HeldEngine) -> None:
    """A key that is missing, a value that is not allowed, a file that is none, a search stopped."""
    with serving(engine, api_keys="ann:secret") as url:
        page = visit(browser, url)
        assert page.locator("#keyrow").is_visible()
        parsed(page, **DIALS)
        page.locator(".pane .alert").get_by_text("wants an API key").wait_for()
        page.fill("#key", "secret")
        parsed(page, **DIALS | {"width": "5000"})
        page.locator(".pane .alert").get_by_text("Search.width").wait_for()
        parsed(page, **DIALS)
        page.locator("#stop").click()
        page.locator(".pane[data-state=stopped]").wait_for()
        engine.let()
        page.set_input_files(
            "#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"no tree"}
        )
        page.locator("#trouble").get_by_text("a.txt is not JSON").wait_for()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing_serious(
    browser: Browser, engine: HeldEngine, url: str, width: int, scheme: str
) -> None:
    """Neither on the empty page nor with a tree, its outline and a selected step."""
    engine.let()
    page = visit(browser, url, width=width, scheme=scheme)
    assert faults(page) == []
    parsed(page, **DIALS)
    done(page)
    page.get_by_text("The tree as text").click()
    page.locator('[role="treeitem"][data-node="1"]').click()
    page.get_by_text("More settings").click()
    assert faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def large_tree() -> dict[str, Any]:
    """A document with NODES nodes: six children everywhere, most of them pruned."""
    nodes = [
        {
            "id": node,
            "parent": (node - 1) // 6,
            "tokens": [1] * 20,
            "text": f"step {node}: {node} + {node} = {2 * node}\n\n",
            "finish": "step",
            "state": "pruned" if node > NODES // 6 and node % 3 else "open",
            "reward": node * 37 % 100 / 100,
            "logprob": -0.5,
            "entropy": 0.5,
        }
        for node in range(1, NODES + 1)
    ]
    return {"object": "search", "tree": {"version": 1, "prompt": [1], "nodes": nodes}}


MEASURE = """async () => {
  const canvas = document.querySelector("canvas.tree");
  const box = canvas.getBoundingClientRect();
  const at = (type, x, y) => canvas.dispatchEvent(new PointerEvent(type, {
    pointerId: 1, clientX: box.left + x, clientY: box.top + y, bubbles: true }));
  const turn = () => new Promise((tell) => requestAnimationFrame(tell));
  canvas.setPointerCapture = () => {};
  const frames = [];
  at("pointerdown", 300, 200);
  let before = await turn();
  for (let i = 1; i <= 60; i += 1) {
    at("pointermove", 300 + 3 * i, 200 + 2 * i);
    if (i % 10 === 0) canvas.dispatchEvent(new WheelEvent("wheel", {
      deltaY: i % 20 ? -60 : 60, ctrlKey: true, clientX: 400, clientY: 300, cancelable: true }));
    const now = await turn();
    frames.push(now - before);
    before = now;
  }
  at("pointerup", 480, 320);
  return frames;
}"""


def test_two_thousand_nodes_are_walked_and_moved(
    browser: Browser, url: str, record_property: pytest.RecordProperty
) -> None:
    """All are there, in the tree and in its outline; the frames' times are recorded, not judged."""
    page = visit(browser, url)
    content = json.dumps(large_tree()).encode()
    page.set_input_files(
        "#file", {"name": "large.json", "mimeType": "application/json", "buffer": content}
    )
    page.locator(f'.pane[data-nodes="{NODES}"]').wait_for()
    frames = sorted(page.evaluate(MEASURE))
    record_property("frame_ms_p50", frames[len(frames) // 2])
    record_property("frame_ms_p95", frames[len(frames) * 95 // 100])
    assert len(frames) == 60
    page.locator("canvas.tree").focus()
    for key in ("0", "Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "step 43:" in page.locator(".details").inner_text()
