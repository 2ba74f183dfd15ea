/**
 * Where each node stands: a column a depth, a row a leaf, parents in the middle of their children.
 * Leaves that were pruned take half a row. One pass over the tree, iterative, in child order.
 */

import { ROOT } from "./tree.js";

const PRUNED_ROW = 0.55;

/** Rows by node id (Float64Array), how many rows there are, and the deepest column. */
export function layOut(tree) {
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
    if (node.children.length) {
      for (let i = node.children.length - 1; i >= 0; i -= 1) stack.push(node.children[i]);
    } else {
      const room = node.state === "pruned" ? PRUNED_ROW : 1;
      rows[node.id] = next + room / 2;
      next += room;
    }
  }
  for (let i = order.length - 1; i >= 0; i -= 1) {
    const { id, children } = nodes[order[i]];
    if (children.length) rows[id] = (rows[children[0]] + rows[children[children.length - 1]]) / 2;
  }
  return { rows, height: Math.max(next, 1), depth, order };
}
