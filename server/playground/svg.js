/** The whole tree as a picture that stands alone. */

import { rewardColour } from "./colour.js";
import { oneLine } from "./dom.js";
import { layOut } from "./layout.js";
import { ROOT } from "./tree.js";

const COLUMN = 230;
const ROW = 24;
const LEFT = 24;
const TOP = 56;

/** An SVG document: every node with its reward and step, the chosen path bold. */
export function treeSvg(tree, title) {
  const layout = layOut(tree);
  const bold = tree.highlighted();
  const x = (node) => LEFT + node.depth * COLUMN;
  const y = (node) => TOP + layout.rows[node.id] * ROW;
  const wide = LEFT + (layout.depth + 1) * COLUMN + 80;
  const high = TOP + layout.height * ROW + 20;
  const edges = [];
  const marks = [];
  for (const node of tree.nodes) {
    const faded = node.state === "pruned" && !bold.has(node.id) ? ' opacity="0.45"' : "";
    if (node.id !== ROOT) {
      const from = tree.nodes[node.parent];
      const middle = (x(from) + x(node)) / 2;
      const style = bold.has(node.id) ? 'stroke="#0b6658" stroke-width="3"' : 'stroke="#b9c2bc"';
      edges.push(`<path d="M${x(from)} ${y(from)}C${middle} ${y(from)} ${middle} ${y(node)} ${x(node)} ${y(node)}" ${style}${faded}/>`);
    }
    marks.push(`<g${faded}>${mark(node, x(node), y(node))}${label(tree, node, x(node), y(node), bold)}</g>`);
  }
  return (
    `<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 ${wide} ${Math.ceil(high)}" width="${wide}" height="${Math.ceil(high)}" ` +
    `font-family="system-ui, sans-serif" font-size="12"><title>${escape(title)}</title>` +
    `<rect width="100%" height="100%" fill="#fff"/><text x="${LEFT}" y="28" font-size="15" font-weight="600">${escape(title)}</text>` +
    `<g fill="none">${edges.join("")}</g>${marks.join("")}</svg>\n`
  );
}

function mark(node, x, y) {
  const colour = node.id === ROOT ? "#1d2a24" : rewardColour(node.reward, false);
  const level = node.id === ROOT ? 1 : (node.reward ?? 0);
  if (node.state === "finished") {
    const top = y + 6 - 12 * level;
    return (
      `<rect x="${x - 6}" y="${y - 6}" width="12" height="12" fill="#fff" stroke="${colour}" stroke-width="1.8"/>` +
      `<rect x="${x - 6}" y="${top}" width="12" height="${12 * level}" fill="${colour}"/>`
    );
  }
  const from = Math.asin(Math.min(Math.max(1 - 2 * level, -1), 1));
  const [dx, dy] = [7 * Math.cos(from), 7 * Math.sin(from)];
  const large = level > 0.5 ? 1 : 0;
  const gauge =
    level >= 1
      ? `<circle cx="${x}" cy="${y}" r="7" fill="${colour}"/>`
      : `<path d="M${x + dx} ${y + dy}A7 7 0 ${large} 1 ${x - dx} ${y + dy}Z" fill="${colour}"/>`;
  const struck = node.state === "pruned" ? `<path d="M${x - 7} ${y + 7}L${x + 7} ${y - 7}" stroke="#5b6861"/>` : "";
  return `<circle cx="${x}" cy="${y}" r="7" fill="#fff" stroke="${colour}" stroke-width="1.6"/>${gauge}${struck}`;
}

function label(tree, node, x, y, bold) {
  if (node.id === ROOT) return "";
  const reward = node.reward === null ? "" : `${node.reward.toFixed(2)} `;
  const weight = bold.has(node.id) ? ' font-weight="600"' : "";
  const most = node.children.length ? 28 : 60;
  const full = `<title>${escape(node.text.trim())}</title>`;
  return `<text x="${x + 13}" y="${y + 4}"${weight} stroke="#fff" stroke-width="4" paint-order="stroke" fill="#1d2a24">${full}${escape(reward + oneLine(node.text, most))}</text>`;
}

function escape(text) {
  const names = { "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" };
  return [...text]
    .map((c) => names[c] ?? (c < " " && c !== "\n" && c !== "\t" ? "\ufffd" : c))
    .join("");
}
