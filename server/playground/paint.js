/**
 * One frame of the tree on a canvas. A disc is a gauge: colour and level both say the reward. A
 * square has finished, a struck one was pruned. The arc around a node is the share of its step's KV
 * that the engine holds.
 */

import { rewardColour } from "./colour.js";
import { paintLabels, RING } from "./labels.js";
import { ROOT } from "./tree.js";

const FADED = 0.38;

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

function paintEdges(pen, { tree, camera, rows, layout, highlighted, theme, height }) {
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
    if (layout.indented) elbow(kinds[kind], x0, y0, x1, y1);
    else kinds[kind].bezierCurveTo(x0 + bend, y0, x1 - bend, y1, x1, y1);
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

/** Down from the parent, then across. */
function elbow(path, x0, y0, x1, y1) {
  const turn = Math.min(6, Math.abs(y1 - y0));
  path.lineTo(x0, y1 - turn);
  path.quadraticCurveTo(x0, y1, x0 + turn, y1);
  path.lineTo(x1, y1);
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
