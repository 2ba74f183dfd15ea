/**
 * Words beside the nodes: what is selected and chosen first, then what lives, pruned steps last. No
 * label stands on another one, nor on a node.
 */

import { oneLine } from "./dom.js";
import { ROOT } from "./tree.js";

export const RING = 3.2; // from a node's edge to its KV arc, where there is room
const HALF = 7; // of a label's height
const LANE = 2 * HALF; // nothing is higher
const LEAST_ROOM = 34;
const TIGHT = 110;
const LONGEST = 420;
const LEAST_ROW = 9;
const PRUNED_ROW = 15;
const ROOMY = 20; // a row in which words have room beside an edge
const ASIDE = 9;

/** Texts of the nodes that have room for one, in one size. */
export function paintLabels(pen, scene, seen) {
  const { theme, highlighted, selected, hovered } = scene;
  pen.font = theme.font;
  pen.textBaseline = "middle";
  pen.lineJoin = "round";
  const taken = new Taken();
  for (const node of seen) takeNode(taken, scene, node);
  for (const node of ranked(scene, seen)) {
    const strong = highlighted.has(node.id) || node.id === selected || node.id === hovered;
    const { x, y } = placeOf(scene, node);
    const room = Math.min(taken.free(x, y), farthest(scene, node)) - x;
    if (room < LEAST_ROOM) continue;
    const told = room < TIGHT || node.reward === null; // then the gauge alone says it
    const reward = told ? "" : `${node.reward.toFixed(2)}  `;
    const text = fitted(pen, reward + oneLine(node.text, 120), Math.min(room, LONGEST));
    taken.add(x, x + pen.measureText(text).width + 6, y, HALF);
    pen.globalAlpha = node.state === "pruned" && !strong ? 0.75 : 1;
    pen.strokeStyle = theme.surface;
    pen.lineWidth = 4;
    pen.strokeText(text, x, y);
    pen.fillStyle = strong ? theme.ink : theme.muted;
    pen.fillText(text, x, y);
  }
  pen.globalAlpha = 1;
}

/** What is taken of the canvas: spans, by the lane that their middles lie in. */
class Taken {
  constructor() {
    this.lanes = new Map();
  }

  add(from, to, y, half) {
    const lane = Math.floor(y / LANE);
    if (!this.lanes.has(lane)) this.lanes.set(lane, []);
    this.lanes.get(lane).push({ from, to, y, half });
  }

  /** How far to the right nothing stands in the way of a label; `x` if something stands there. */
  free(x, y) {
    let end = Infinity;
    for (let lane = Math.floor(y / LANE) - 1; lane <= Math.floor(y / LANE) + 1; lane += 1) {
      for (const { from, to, y: other, half } of this.lanes.get(lane) ?? []) {
        if (to > x && Math.abs(other - y) < HALF + half) end = Math.min(end, Math.max(from, x));
      }
    }
    return end - 6;
  }
}

function takeNode(taken, { camera, rows }, node) {
  const wide = camera.radius + RING;
  const x = camera.x(node.depth);
  taken.add(x - wide, x + wide, camera.y(rows[node.id]), camera.radius);
}

/** Where a label begins, and its middle: beside the edges that leave the node, where rows allow it. */
function placeOf(scene, node) {
  const { camera, rows, layout } = scene;
  const x = camera.x(node.depth) + camera.radius + RING + 5;
  const y = camera.y(rows[node.id]);
  if (!node.children.length || layout.indented || camera.row < ROOMY) return { x, y };
  return { x, y: y + (risesFrom(scene, node) ? ASIDE : -ASIDE) };
}

/** Whether the edge that matters most goes up from here. */
function risesFrom({ rows, highlighted }, node) {
  const child = node.children.find((id) => highlighted.has(id)) ?? node.children[node.children.length - 1];
  return rows[child] < rows[node.id] - 0.01;
}

/** A label ends where the next column begins, if the node has children there. */
function farthest({ camera, width, layout }, node) {
  if (layout.indented || !node.children.length) return width - 8;
  return camera.x(node.depth + 1) - camera.radius - RING - 8;
}

/** Who gets a label, the most important first. */
function ranked({ camera, highlighted, selected, hovered }, seen) {
  const rank = (node) => {
    if (node.id === selected || node.id === hovered) return 0;
    if (highlighted.has(node.id)) return 1;
    return node.state === "pruned" ? 3 : 2;
  };
  const least = [0, 0, LEAST_ROW, PRUNED_ROW];
  return seen
    .filter((node) => node.id !== ROOT && camera.row >= least[rank(node)])
    .sort((a, b) => rank(a) - rank(b) || a.id - b.id);
}

const widths = new Map();

function fitted(pen, text, room) {
  const key = `${text}|${Math.round(room / 6)}`;
  if (widths.has(key)) return widths.get(key);
  let shown = text;
  if (pen.measureText(text).width > room) {
    let low = 0;
    let high = text.length;
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (pen.measureText(`${text.slice(0, middle)}…`).width <= room) low = middle;
      else high = middle - 1;
    }
    shown = `${text.slice(0, low).trimEnd()}…`;
  }
  if (widths.size > 5000) widths.clear();
  widths.set(key, shown);
  return shown;
}
