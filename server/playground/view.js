/** The tree on a canvas: drawn when something changes, walked by mouse, finger and keyboard. */

import { Camera, heightFor, narrow } from "./camera.js";
import { h } from "./dom.js";
import { layOut } from "./layout.js";
import { paint } from "./paint.js";
import { ROOT, SearchTree } from "./tree.js";

const GLIDE = 0.28; // share of the way to its place that a node goes in a frame
const NEAR = 14;
const LEAST_HIGH = 180;
const MOST_HIGH = 0.72; // of the window
const HELP =
  "Arrow keys walk the tree: left to the parent, right to the first child, up and down within a " +
  "level. Home goes to the root, End to the chosen reply. Plus, minus and 0 magnify, shrink and fit. " +
  "Enter goes to the step's details.";

export class TreeView {
  /** `pick(id)` hears which node was selected, `open()` that Enter was pressed. */
  constructor(pick, open) {
    this.pick = pick;
    this.open = open;
    this.camera = new Camera();
    this.tree = new SearchTree();
    this.selected = null;
    this.hovered = null;
    this.focused = false;
    this.frames = 0;
    this.high = 0; // of the canvas, in pixels
    this.layout = layOut(this.tree);
    this.highlighted = new Set();
    this.rows = Float64Array.from(this.layout.rows);
    this.waiting = false;
    this.canvas = h("canvas", {
      class: "tree",
      tabindex: "0",
      role: "application",
      "aria-roledescription": "search tree",
      "aria-label": "Search tree, empty",
      "aria-description": HELP,
    });
    this.pen = this.canvas.getContext("2d");
    this.listen();
    new ResizeObserver(() => this.resize()).observe(this.canvas);
    for (const query of ["(prefers-color-scheme: dark)", "(prefers-reduced-motion: reduce)"]) {
      matchMedia(query).addEventListener("change", () => this.retheme());
    }
    this.retheme();
  }

  show(tree) {
    this.tree = tree;
    this.selected = null;
    this.camera.moved = false;
    this.rows = new Float64Array(0);
    this.high = 0;
    this.change();
  }

  /** The tree has changed: lay it out again before the next frame. */
  change() {
    this.stale = true;
    this.redraw();
  }

  redraw() {
    if (this.waiting) return;
    this.waiting = true;
    requestAnimationFrame(() => this.frame());
  }

  select(id, reveal = true) {
    this.selected = id;
    const node = this.tree.nodes[id];
    if (reveal && node) {
      this.camera.reveal(node.depth, this.layout.rows[id] ?? 0, this.width, this.height);
    }
    this.redraw();
  }

  fit() {
    this.camera.fit(this.layout, this.width, this.height);
    this.redraw();
  }

  zoom(factor) {
    this.camera.zoom(factor, this.width / 2, this.height / 2);
    this.redraw();
  }

  frame() {
    this.waiting = false;
    this.frames += 1;
    if (this.stale) this.relay();
    const moving = this.glide();
    paint(this.pen, this);
    if (moving) this.redraw();
  }

  relay() {
    this.stale = false;
    this.highlighted = this.tree.highlighted();
    this.layout = layOut(this.tree, narrow(this.tree.depth, this.width), this.highlighted);
    this.stretch();
    if (!this.camera.moved) this.camera.fit(this.layout, this.width, this.height);
    const said = `Search tree, ${this.tree.size} steps`;
    if (this.canvas.getAttribute("aria-label") !== said) this.canvas.setAttribute("aria-label", said);
  }

  /** As high as the tree needs; it does not shrink while the tree grows. */
  stretch() {
    const most = Math.max(LEAST_HIGH, Math.min(800, window.innerHeight * MOST_HIGH));
    this.high = Math.max(this.high, heightFor(this.layout, LEAST_HIGH, most));
    this.canvas.style.height = `${this.high}px`;
    if (this.canvas.clientHeight !== this.height) this.resize();
  }

  /** Let the rows come nearer to where they belong; new nodes set out from their parents. */
  glide() {
    const { rows: goal } = this.layout;
    if (this.rows.length !== goal.length) {
      const grown = new Float64Array(goal.length);
      grown.set(this.rows.subarray(0, goal.length));
      for (let id = this.rows.length; id < goal.length; id += 1) {
        const { parent } = this.tree.nodes[id];
        grown[id] = parent < 0 || this.still ? goal[id] : grown[parent];
      }
      this.rows = grown;
    }
    let moving = false;
    for (let id = 0; id < goal.length; id += 1) {
      const left = goal[id] - this.rows[id];
      const near = this.still || Math.abs(left) * this.camera.row < 0.4;
      this.rows[id] += near ? left : left * GLIDE;
      moving ||= !near;
    }
    return moving;
  }

  resize() {
    const { clientWidth, clientHeight } = this.canvas;
    const scale = window.devicePixelRatio || 1;
    this.width = clientWidth;
    this.height = clientHeight;
    this.canvas.width = Math.round(clientWidth * scale);
    this.canvas.height = Math.round(clientHeight * scale);
    this.pen.setTransform(scale, 0, 0, scale, 0, 0);
    this.stale = true;
    this.redraw();
  }

  retheme() {
    const style = getComputedStyle(document.documentElement);
    const colour = (name) => style.getPropertyValue(`--${name}`).trim();
    this.dark = matchMedia("(prefers-color-scheme: dark)").matches;
    this.still = matchMedia("(prefers-reduced-motion: reduce)").matches;
    this.theme = Object.fromEntries(
      ["ink", "muted", "edge", "surface", "accent", "focus", "kv", "back"].map((name) => [name, colour(name)]),
    );
    this.theme.font = `12px ${colour("sans") || "sans-serif"}`;
    this.redraw();
  }

  listen() {
    const { canvas } = this;
    const fingers = new Map();
    let travelled = 0;
    canvas.addEventListener("pointerdown", (event) => {
      canvas.setPointerCapture(event.pointerId);
      fingers.set(event.pointerId, event);
      travelled = 0;
    });
    canvas.addEventListener("pointermove", (event) => {
      const before = fingers.get(event.pointerId);
      if (!before) {
        this.hover(this.at(event));
        return;
      }
      travelled += Math.hypot(event.clientX - before.clientX, event.clientY - before.clientY);
      if (fingers.size === 2) this.pinch(fingers, before, event);
      else if (travelled > 4) this.camera.pan(event.clientX - before.clientX, event.clientY - before.clientY);
      fingers.set(event.pointerId, event);
      this.redraw();
    });
    canvas.addEventListener("pointerup", (event) => {
      fingers.delete(event.pointerId);
      const found = travelled > 4 ? null : this.at(event);
      if (found !== null) this.choose(found, false);
    });
    canvas.addEventListener("pointercancel", (event) => fingers.delete(event.pointerId));
    canvas.addEventListener("pointerleave", () => this.hover(null));
    canvas.addEventListener("wheel", (event) => this.wheel(event), { passive: false });
    canvas.addEventListener("keydown", (event) => this.key(event));
    for (const [name, focused] of [["focus", true], ["blur", false]]) {
      canvas.addEventListener(name, () => {
        this.focused = focused;
        this.redraw();
      });
    }
  }

  pinch(fingers, before, now) {
    const other = [...fingers.values()].find((finger) => finger.pointerId !== now.pointerId);
    const span = (a, b) => Math.hypot(a.clientX - b.clientX, a.clientY - b.clientY);
    const box = this.canvas.getBoundingClientRect();
    const x = (now.clientX + other.clientX) / 2 - box.left;
    const y = (now.clientY + other.clientY) / 2 - box.top;
    this.camera.zoom(span(now, other) / Math.max(span(before, other), 1), x, y);
  }

  /** With Ctrl or a pinch the wheel magnifies; the page's scrolling is left alone otherwise. */
  wheel(event) {
    if (!event.ctrlKey && !event.metaKey) return;
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    const factor = Math.exp(-event.deltaY / 300);
    this.camera.zoom(factor, event.clientX - box.left, event.clientY - box.top);
    this.redraw();
  }

  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const shortcuts = {
      "+": () => this.zoom(1.25),
      "=": () => this.zoom(1.25),
      "-": () => this.zoom(0.8),
      0: () => this.fit(),
      Enter: () => this.selected !== null && this.open(),
    };
    const next = this.neighbour(event.key);
    if (next === undefined && !shortcuts[event.key]) return;
    event.preventDefault();
    if (next !== undefined) this.choose(next, true);
    else shortcuts[event.key]();
  }

  /** Where a key leads from the selected node; undefined for keys that do not walk. */
  neighbour(key) {
    const node = this.tree.nodes[this.selected ?? ROOT];
    if (this.selected === null && key.startsWith("Arrow")) return ROOT;
    switch (key) {
      case "ArrowLeft":
        return Math.max(node.parent, ROOT);
      case "ArrowRight":
        return this.favourite(node);
      case "ArrowUp":
      case "ArrowDown": {
        const level = this.layout.order.filter((id) => this.tree.nodes[id].depth === node.depth);
        const at = level.indexOf(node.id) + (key === "ArrowUp" ? -1 : 1);
        return level[Math.min(Math.max(at, 0), level.length - 1)];
      }
      case "Home":
        return ROOT;
      case "End":
        return this.tree.chosen ?? node.id;
      default:
        return undefined;
    }
  }

  /** The child on the highlighted path, or else the first one. */
  favourite(node) {
    const highlighted = this.tree.highlighted();
    const bold = node.children.find((id) => highlighted.has(id));
    return bold ?? node.children[0] ?? node.id;
  }

  choose(id, reveal) {
    this.select(id, reveal);
    this.pick(id);
  }

  hover(id) {
    this.canvas.classList.toggle("pointing", id !== null);
    if (id === this.hovered) return;
    this.hovered = id;
    this.redraw();
  }

  /** The node under the pointer, or the nearest one that is close. */
  at(event) {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left;
    const y = event.clientY - box.top;
    let best = null;
    let least = Math.max(NEAR, event.pointerType === "touch" ? 22 : 0);
    for (const node of this.tree.nodes) {
      const far = Math.hypot(this.camera.x(node.depth) - x, this.camera.y(this.rows[node.id]) - y);
      if (far < least) [best, least] = [node.id, far];
    }
    return best;
  }
}
