/**
 * One frame of the tree on a canvas. A disc is a gauge: colour and level both say the reward. A
 * square has finished, a struck one was pruned. The arc around a node is the share of its step's KV
 * that the engine holds.
 */

import { rewardColour } from "./colour.js";
import { oneLine } from "./dom.js";
import { ROOT } from "./tree.js";

const FADED = 0.38;
const LABEL_ROW = 14;
const LEAST_ROW = 9;
const SLOTS = 1 << 20;
const TIGHT = 100;
const RING = 3.2; // from a node's edge to its KV arc, where there is room

/**
 * `scene`: tree, camera, rows (as drawn now), highlighted (a set), selected, hovered, focused,
 * theme (CSS colours), dark, width, height in CSS pixels.
 */
export function paint(pen, scene) {
  pen.clearRect(0, 0, scene.width, scene.height);
  const seen = visible(scene);
  paintEdges(pen, scene);
  for (const node of seen) paintNode(pen, scene, node);
  paintLabels(pen, scene, seen);
}

function visible({ tree, camera, rows, width, height }) {
  const margin = 12;
  return tree.nodes.filter((node) => {
    const y = camera.y(rows[node.id]);
    const x = camera.x(node.depth);
    return y > -margin && y < height + margin && x > -camera.column && x < width + margin;
  });
}

function paintEdges(pen, { tree, camera, rows, highlighted, theme, height }) {
  const kinds = [new Path2D(), new Path2D(), new Path2D()];
  const bend = camera.column * 0.45;
  for (const node of tree.nodes) {
    if (node.id === ROOT) continue;
    const x0 = camera.x(node.depth - 1);
    const y0 = camera.y(rows[node.parent]);
    const y1 = camera.y(rows[node.id]);
    if (Math.max(y0, y1) < 0 || Math.min(y0, y1) > height) continue;
    const x1 = x0 + camera.column;
    const kind = highlighted.has(node.id) ? 2 : node.state === "pruned" ? 0 : 1;
    kinds[kind].moveTo(x0, y0);
    kinds[kind].bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
  }
  const thin = camera.row < 6 ? 0.7 : 1.2;
  const styles = [
    [theme.edge, thin * 0.8, FADED],
    [theme.edge, thin, 1],
    [theme.accent, camera.row < 6 ? 1.6 : 3, 1],
  ];
  kinds.forEach((path, kind) => {
    [pen.strokeStyle, pen.lineWidth, pen.globalAlpha] = styles[kind];
    pen.stroke(path);
  });
  pen.globalAlpha = 1;
}

function paintNode(pen, scene, node) {
  const { camera, rows, theme, dark, highlighted, selected, hovered, focused, tree } = scene;
  const x = camera.x(node.depth);
  const y = camera.y(rows[node.id]);
  const radius = camera.radius;
  const colour = node.id === ROOT ? theme.ink : rewardColour(node.reward, dark);
  pen.globalAlpha = node.state === "pruned" && !highlighted.has(node.id) ? FADED : 1;
  if (radius < 2.6) {
    speck(pen, x, y, radius, colour, node.state === "finished");
  } else if (node.state === "finished") {
    square(pen, x, y, radius * 0.92, node.reward ?? 1, colour, theme.surface);
  } else {
    disc(pen, x, y, radius, node.id === ROOT ? 1 : (node.reward ?? 0), colour, theme.surface);
  }
  if (radius >= 2.6) {
    if (node.state === "pruned") strike(pen, x, y, radius, theme.muted);
    kvRing(pen, scene, node, x, y, radius + Math.min(RING, radius * 0.6));
  }
  pen.globalAlpha = 1;
  if (node.id === tree.chosen) ring(pen, x, y, radius + RING + 3, theme.accent, 2);
  if (node.id === hovered) ring(pen, x, y, radius + RING + 2, theme.muted, 1.5);
  if (node.id === selected) ring(pen, x, y, radius + RING + 4, focused ? theme.focus : theme.ink, 2.5);
}

/** A node with no room for a gauge. */
function speck(pen, x, y, radius, colour, angular) {
  pen.fillStyle = colour;
  if (angular) {
    pen.fillRect(x - radius, y - radius, 2 * radius, 2 * radius);
    return;
  }
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fill();
}

function disc(pen, x, y, radius, level, colour, surface) {
  pen.beginPath();
  pen.arc(x, y, radius, 0, 2 * Math.PI);
  pen.fillStyle = surface;
  pen.fill();
  const from = Math.asin(Math.min(Math.max(1 - 2 * level, -1), 1));
  pen.beginPath();
  pen.arc(x, y, radius, from, Math.PI - from);
  pen.fillStyle = colour;
  pen.fill();
  ring(pen, x, y, radius, colour, 1.6);
}

function square(pen, x, y, half, level, colour, surface) {
  pen.fillStyle = surface;
  pen.fillRect(x - half, y - half, 2 * half, 2 * half);
  pen.fillStyle = colour;
  pen.fillRect(x - half, y + half - 2 * half * level, 2 * half, 2 * half * level);
  pen.strokeStyle = colour;
  pen.lineWidth = 1.8;
  pen.strokeRect(x - half, y - half, 2 * half, 2 * half);
}

function strike(pen, x, y, radius, colour) {
  pen.beginPath();
  pen.moveTo(x - radius, y + radius);
  pen.lineTo(x + radius, y - radius);
  pen.strokeStyle = colour;
  pen.lineWidth = 1.2;
  pen.stroke();
}

function ring(pen, x, y, radius, colour, width, share = 1) {
  pen.beginPath();
  pen.arc(x, y, radius, -Math.PI / 2, -Math.PI / 2 + 2 * Math.PI * share);
  pen.strokeStyle = colour;
  pen.lineWidth = width;
  pen.stroke();
}

function kvRing(pen, { tree, theme }, node, x, y, radius) {
  const state = tree.kvState(node);
  if (state === "" || state === "released") return;
  if (state === "evicted") {
    pen.setLineDash([1.5, 3]);
    ring(pen, x, y, radius, theme.muted, 1.2);
    pen.setLineDash([]);
    return;
  }
  const back = state === "just rehydrated";
  ring(pen, x, y, radius, back ? theme.back : theme.kv, back ? 2.8 : 1.6, node.kept / node.tokens.length);
}

/** Texts of the nodes that have room for one, in one size; the highlighted ones first. */
function paintLabels(pen, scene, seen) {
  const { camera, rows, theme, highlighted, selected, hovered } = scene;
  pen.font = theme.font;
  pen.textBaseline = "middle";
  const standing = occupancy(scene, seen);
  for (const node of labelled(scene, seen)) {
    if (node.id === ROOT) continue;
    const strong = highlighted.has(node.id) || node.id === selected || node.id === hovered;
    const x = camera.x(node.depth) + camera.radius + RING + 7;
    const y = camera.y(rows[node.id]);
    const room = roomFor(scene, standing, node, y) - x;
    if (room < 34) continue;
    const tight = room < TIGHT || node.reward === null;
    const reward = tight ? "" : `${node.reward.toFixed(2)}  `; // the gauge says it too
    const text = fitted(pen, reward + oneLine(node.text, 90), Math.min(room, 330));
    const wide = pen.measureText(text).width;
    pen.globalAlpha = 1;
    pen.fillStyle = theme.surface;
    pen.fillRect(x - 3, y - 7, wide + 6, 14);
    pen.globalAlpha = node.state === "pruned" && !strong ? 0.75 : 1;
    pen.fillStyle = strong ? theme.ink : theme.muted;
    pen.fillText(text, x, y);
  }
  pen.globalAlpha = 1;
}

/** Which slots of height LABEL_ROW have a node, by column. */
function occupancy({ camera, rows }, seen) {
  const standing = new Set();
  for (const node of seen) {
    standing.add(node.depth * SLOTS + Math.round(camera.y(rows[node.id]) / (LABEL_ROW / 2)));
  }
  return standing;
}

/** How far to the right a label may reach: to the next node in its way, or to the edge. */
function roomFor({ camera, width, layout }, standing, node, y) {
  const slot = Math.round(y / (LABEL_ROW / 2));
  for (let depth = node.depth + 1; depth <= layout.depth; depth += 1) {
    const key = depth * SLOTS + slot;
    const met = node.children.length || [-1, 0, 1].some((near) => standing.has(key + near));
    if (met) return camera.x(depth) - camera.radius - RING - 8;
  }
  return width - 8;
}

/** Who gets a label: what matters always, the rest where rows are high enough; none overlap. */
function labelled({ camera, rows, highlighted, selected, hovered }, seen) {
  const rank = (node) => {
    if (node.id === selected || node.id === hovered) return 0;
    if (highlighted.has(node.id)) return 1;
    return node.state === "pruned" ? 3 : 2;
  };
  const taken = new Map();
  const found = [];
  for (const node of [...seen].sort((a, b) => rank(a) - rank(b) || a.id - b.id)) {
    if (rank(node) > 1 && camera.row < LEAST_ROW) continue;
    const y = camera.y(rows[node.id]);
    const slot = Math.floor(y / LABEL_ROW);
    const key = node.depth * SLOTS + slot;
    const near = [taken.get(key - 1), taken.get(key), taken.get(key + 1)];
    if (near.some((other) => other !== undefined && Math.abs(other - y) < LABEL_ROW)) continue;
    taken.set(key, y);
    found.push(node);
  }
  return found;
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
