"""The playground in a browser, used by mouse, keyboard and screen reader."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from playwright.sync_api import Browser, Page, Route

from models.bundled import SPRIG_FOLDER
from tests.server.browser import (
    SCRIPT_ERRORS,
    GatedEngine,
    chromium,
    serving,
    submit,
    visit,
    wait_for_done,
)

pytestmark = pytest.mark.slow

DIALS = {"policy": "rebase", "width": "6", "seed": "4"}
NODES = 2_000
TARGET = 44
"""Minimum height in pixels of what a finger presses."""
QUESTION = "Use 4 9 10 13 to make 24."


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for all tests of this file."""
    with chromium() as browser:
        yield browser


@pytest.fixture(autouse=True)
def no_script_fails() -> Iterator[None]:
    """Fail a test in which the page's own scripts had an error."""
    SCRIPT_ERRORS.clear()
    yield
    assert SCRIPT_ERRORS == []


@pytest.fixture
def engine() -> GatedEngine:
    """An engine that waits for the test."""
    return GatedEngine()


@pytest.fixture
def url(engine: GatedEngine) -> Iterator[str]:
    """A server for one test; it waits for nothing when the test ends."""
    with serving(engine) as url:
        yield url
        engine.allow()


def faults(page: Page) -> list[str]:
    """Return what axe finds, by rule and element."""
    violations = Axe().run(page).response["violations"]
    return [f"{rule['id']}: {node['html']}" for rule in violations for node in rule["nodes"]]


def test_nodes_appear_before_the_answer(
    browser: Browser, engine: GatedEngine, url: str, tmp_path: Path
) -> None:
    """Type, run, watch, click a step, branch from it, export the tree and open it again."""
    page = visit(browser, url)
    pane = page.locator(".pane")
    engine.allow(1)
    submit(page, **DIALS)
    page.locator('.pane[data-state="growing"][data-nodes="6"]').wait_for()
    assert not page.locator(".answers").is_visible()
    assert page.locator("#stop").is_visible()
    engine.allow()
    wait_for_done(page)
    assert int(pane.get_attribute("data-nodes") or 0) > 6
    assert "votes" in page.locator(".answers").inner_text()
    assert page.locator(".reply li").all_inner_texts()[-1].count("The answer is") == 1
    assert "votes" in page.locator(".verdict").inner_text()
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
    assert page.evaluate("document.activeElement.textContent").endswith("from step 1")
    wait_for_done(page)
    assert page.locator(".pane h2").inner_text() == "rebase 6, seed 5, from step 1"
    page.locator(".crumbs").get_by_text("whole search").click()

    with page.expect_download() as download:
        page.get_by_role("button", name="Export the tree as JSON").click()
    file = tmp_path / "tree.json"
    download.value.save_as(file)
    document = json.loads(file.read_text())
    assert document["tree"]["version"] == 1
    assert len(document["tree"]["nodes"]) == int(pane.get_attribute("data-nodes") or 0)
    with page.expect_download() as download:
        page.get_by_role("button", name="Export the tree as SVG").click()
    assert download.value.path().read_text().startswith("<svg xmlns=")

    before = (pane.get_attribute("data-nodes"), page.locator(".answers").inner_text())
    second_page = visit(browser, url)
    second_page.set_input_files("#file", file)
    wait_for_done(second_page)
    after = (
        second_page.locator(".pane").get_attribute("data-nodes"),
        second_page.locator(".answers").inner_text(),
    )
    assert after == before
    assert second_page.locator(".kv figcaption").is_visible()
    assert second_page.input_value("#question") == "What?"


def test_a_click_selects_and_kv_is_told_of_each_step(
    browser: Browser, engine: GatedEngine, url: str
) -> None:
    """Half of step 1 is evicted in one round and back in the next; the outline says so too."""
    page = visit(browser, url)
    engine.allow(1)
    submit(page, **DIALS)
    page.locator('.pane[data-nodes="6"]').wait_for()
    page.locator(".panel.kv").wait_for()  # what is below it moves until then
    page.get_by_text("The tree as text").click()
    first = page.locator('[role="treeitem"][data-node="1"]')
    first.click()
    page.locator(".details").get_by_text("4 of").wait_for()
    assert "KV partly evicted" in (first.get_attribute("aria-label") or "")
    engine.allow(1)
    page.locator(".details").get_by_text("just rehydrated").wait_for()
    box = page.locator("canvas.tree").bounding_box()
    assert box is not None
    page.locator("canvas.tree").click(position={"x": 26, "y": box["height"] / 2})
    page.locator(".details").get_by_text("The question").wait_for()


def test_two_policies_side_by_side(browser: Browser, engine: GatedEngine, url: str) -> None:
    """Both have one question and seed; on a phone one is below the other, without overflow."""
    engine.allow()
    page = visit(browser, url)
    page.check("#compare")
    submit(page, **DIALS, other="beam")
    wait_for_done(page, 2)
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
    policies, tokens = (page.locator(f".race tbody {cell}") for cell in ("th", "td:nth-child(3)"))
    assert policies.all_inner_texts() == ["rebase", "beam"]
    assert all(text.strip() > "0" for text in tokens.all_inner_texts())


def test_the_keyboard_walks_the_tree(browser: Browser, engine: GatedEngine, url: str) -> None:
    """Right to a child, left to the parent, down and up within a level; a live region speaks."""
    engine.allow()
    page = visit(browser, url)
    submit(page, **DIALS)
    wait_for_done(page)
    page.locator("canvas.tree").focus()
    announcements = []
    for key in ("Home", "ArrowRight", "ArrowDown", "ArrowUp", "ArrowLeft", "End"):
        page.keyboard.press(key)
        announcements.append(page.locator("#live").inner_text())
    assert announcements[0] == announcements[4] == "Question: What?"
    assert announcements[1] == announcements[3] != announcements[2]
    assert "chosen" in announcements[5]
    page.get_by_text("The tree as text").click()
    page.locator('[role="treeitem"][tabindex="0"]').focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowDown")
    item = page.locator('[role="treeitem"]:focus')
    assert item.get_attribute("data-node") == "1"
    assert item.get_attribute("aria-selected") == "true"


def test_what_goes_wrong_is_said_in_plain_words(browser: Browser, engine: GatedEngine) -> None:
    """A missing key, a file that holds no tree, and a search that was stopped."""
    with serving(engine, api_keys="ann:secret") as url:
        page = visit(browser, url)
        assert page.locator("#keyrow").is_visible()
        submit(page, **DIALS)
        page.locator("#trouble").get_by_text("wants an API key").wait_for()
        page.fill("#key", "secret")
        submit(page, **DIALS)
        page.locator("#stop").click()
        page.locator(".pane[data-state=stopped]").wait_for()
        engine.allow()
        page.set_input_files(
            "#file", {"name": "a.txt", "mimeType": "text/plain", "buffer": b"no tree"}
        )
        page.locator("#trouble").get_by_text("a.txt is not JSON").wait_for()


@pytest.mark.promise(
    "The playground marks the field of a wrong value and keeps the tree that it shows."
)
def test_a_wrong_value_is_marked_and_the_tree_stays(
    browser: Browser, engine: GatedEngine, url: str
) -> None:
    """Values that the page or only the server can refuse: the field gets the focus, and the earlier
    tree stays."""
    engine.allow()
    page = visit(browser, url)
    submit(page, **DIALS)
    wait_for_done(page)
    node_count = page.locator(".pane").get_attribute("data-nodes")
    for name, value, words in (
        ("width", "0", "Width: a whole number from 1 to"),
        ("seed", "1.5", "Seed: a whole number from 0"),
        ("dial-temperature", "9", "Temperature: a number from 0 to 5."),
        ("dial-branch", "5000", "Search.branch"),
    ):
        field = page.locator(f"#{name}")
        field.evaluate("(one, value) => { one.value = value; }", value)
        page.locator("#run").click()
        page.locator("#trouble").get_by_text(words).wait_for()
        assert field.get_attribute("aria-invalid") == "true"
        assert page.evaluate("document.activeElement.id") == name
        assert page.locator(".pane").get_attribute("data-nodes") == node_count
        field.evaluate("(one) => { one.value = ''; }")
    submit(page, **DIALS)
    page.locator("#trouble").wait_for(state="hidden")
    assert page.locator("[aria-invalid]").count() == 0


def test_a_recording_is_there_before_anything_is_asked(
    browser: Browser, engine: GatedEngine
) -> None:
    """It cannot be branched from; asked another question, the page says what the bundled model
    knows."""
    with serving(engine, policy_model=SPRIG_FOLDER / "policy") as url:
        page = visit(browser, url)
        wait_for_done(page)
        assert page.locator(".pane h2").inner_text().startswith("Recorded: rebase")
        assert engine.rounds == 0
        page.locator(".pathstep").first.click()
        assert page.get_by_role("button", name="Branch from here").is_disabled()
        page.locator("#recordings").get_by_role("button", name="wordproblem").click()
        page.locator(".verdict strong").get_by_text(re.compile(r"^\d+$")).wait_for()
        engine.allow()
        submit(page, QUESTION, **DIALS)
        wait_for_done(page)
        assert not page.locator("#hint").is_visible()
        submit(page, "Hello, who are you?", **DIALS)
        page.locator("#hint").get_by_text("sprig was taught").wait_for()


@pytest.mark.parametrize("question", ["What?", ""])
def test_a_question_being_typed_is_left_alone(
    browser: Browser, engine: GatedEngine, url: str, question: str
) -> None:
    """The page's first recording arrives late, when somebody is typing or about to."""
    page = browser.new_page(reduced_motion="reduce")
    routes: list[Route] = []

    def hold(route: Route) -> None:
        routes.append(route)

    page.route("**/recorded.json", hold)
    with page.expect_request("**/recorded.json"):
        page.goto(url)
    page.locator("#policy option").first.wait_for(state="attached")
    if question:
        page.fill("#question", question)
    else:
        page.focus("#question")
    before = page.input_value("#question")
    routes[0].continue_()
    wait_for_done(page)
    assert page.locator(".pane h2").inner_text().startswith("Recorded")
    assert page.input_value("#question") == before


def test_steps_of_the_way_here_take_the_focus_along(
    browser: Browser, engine: GatedEngine, url: str
) -> None:
    """The focus moves from a step's details to those of a step before it."""
    engine.allow()
    page = visit(browser, url)
    submit(page, **DIALS)
    wait_for_done(page)
    page.locator(".pathstep").last.click()
    page.locator(".way button").first.click()
    assert page.evaluate("document.activeElement.textContent").startswith("Step ")


LABELS = """
window.labels = [];
const { fillText, clearRect } = CanvasRenderingContext2D.prototype;
CanvasRenderingContext2D.prototype.clearRect = function (...box) {
  window.labels = [];
  clearRect.apply(this, box);
};
CanvasRenderingContext2D.prototype.fillText = function (text, x, y) {
  window.labels.push([text, x, x + this.measureText(text).width, y]);
  fillText.call(this, text, x, y);
};
"""


@pytest.mark.parametrize("width", [390, 820, 1440])
def test_no_label_stands_on_another_and_the_chosen_steps_have_theirs(
    browser: Browser, engine: GatedEngine, url: str, width: int
) -> None:
    """Checked on a recorded search of 64 steps, most of them pruned or not chosen."""
    page = browser.new_page(viewport={"width": width, "height": 900}, reduced_motion="reduce")
    page.add_init_script(LABELS)
    page.goto(url)
    wait_for_done(page)
    steps = [text.splitlines()[0] for text in page.locator(".reply li span").all_inner_texts()]
    page.wait_for_timeout(0)
    labels = page.evaluate("window.labels")
    for step in steps:
        assert any(step[:12] in text for text, *_ in labels)
    boxes = sorted(labels, key=lambda label: label[3])
    for index, (_, left, right, y) in enumerate(boxes):
        for _, other_left, other_right, other_y in boxes[index + 1 :]:
            if other_y - y >= 13:
                break
            assert right <= other_left or other_right <= left


def test_what_a_finger_presses_is_large_enough(
    browser: Browser, engine: GatedEngine, url: str
) -> None:
    """Checked on a phone, with a tree, its outline and a step's details open."""
    engine.allow()
    page = visit(browser, url, width=390)
    submit(page, **DIALS)
    wait_for_done(page)
    page.get_by_text("The tree as text").click()
    page.get_by_text("More settings").click()
    page.locator('[role="treeitem"][data-node="1"]').click()
    controls = page.locator("button:visible, summary:visible, input:visible, select:visible")
    for element in controls.all():
        box = element.bounding_box()
        assert box is not None
        if element.get_attribute("type") == "checkbox":
            continue  # its label is high enough
        assert box["height"] >= TARGET, element.evaluate("(one) => one.outerHTML")


@pytest.mark.promise(
    "The playground has no accessibility fault that axe finds, wide or narrow, light or dark."
)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 390])
def test_axe_finds_nothing(
    browser: Browser, engine: GatedEngine, url: str, width: int, scheme: str
) -> None:
    """Checked beside a recording, and with a tree, its outline and a selected step."""
    engine.allow()
    page = visit(browser, url, width=width, scheme=scheme)
    assert faults(page) == []
    submit(page, **DIALS)
    wait_for_done(page)
    page.get_by_text("The tree as text").click()
    page.locator('[role="treeitem"][data-node="1"]').click()
    page.get_by_text("More settings").click()
    assert faults(page) == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def large_tree() -> dict[str, Any]:
    """Return a document with NODES nodes: six children each, most of them pruned."""
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


def test_two_thousand_nodes_are_walked_and_moved(browser: Browser, url: str) -> None:
    """Tree and outline have them all; the tree is dragged, zoomed and walked by keyboard."""
    page = visit(browser, url)
    content = json.dumps(large_tree()).encode()
    page.set_input_files(
        "#file", {"name": "large.json", "mimeType": "application/json", "buffer": content}
    )
    page.locator(f'.pane[data-nodes="{NODES}"]').wait_for()
    canvas = page.locator("canvas.tree")
    canvas.hover()
    page.mouse.down()
    page.mouse.move(400, 300, steps=20)
    page.mouse.up()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -60)
    page.keyboard.up("Control")
    canvas.focus()
    for key in ("0", "Home", "ArrowRight", "ArrowRight", "ArrowRight"):
        page.keyboard.press(key)
    assert "step 43:" in page.locator(".details").inner_text()
