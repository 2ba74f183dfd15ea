/**
 * Where each node stands: one pass over the tree, iterative, in child order. Wide: a column a depth,
 * a row a leaf, parents in the middle of their children. Indented, where columns would be too narrow
 * for words: a row a node, below its parent. Leaves that were pruned take half a row, and indented
 * what is highlighted takes more.
 */

import { ROOT } from "./tree.js";

const PRUNED_ROW = 0.55;
const BOLD_ROW = 2.6;

/** Rows by node id (Float64Array), how many rows there are, the deepest column, and the order. */
export function layOut(tree, indented = false, highlighted = new Set()) {
  const { nodes } = tree;
  const rows = new Float64Array(nodes.length);
  let next = 0;
  let depth = 1;
  const stack = [ROOT];
  const order = [];
  while (stack.length) {
    const node = nodes[stack.pop()];
    order.push(node.id);
    depth = Math.max(depth, node.depth);
    for (let i = node.children.length - 1; i >= 0; i -= 1) stack.push(node.children[i]);
    if (node.children.length && !indented) continue;
    const pruned = node.state === "pruned" && !node.children.length;
    const room = indented && highlighted.has(node.id) ? BOLD_ROW : pruned ? PRUNED_ROW : 1;
    rows[node.id] = next + room / 2;
    next += room;
  }
  if (!indented) centre(nodes, order, rows);
  return { rows, height: Math.max(next, 1), depth, order, indented };
}

function centre(nodes, order, rows) {
  for (let i = order.length - 1; i >= 0; i -= 1) {
    const { id, children } = nodes[order[i]];
    if (children.length) rows[id] = (rows[children[0]] + rows[children[children.length - 1]]) / 2;
  }
}
