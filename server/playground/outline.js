/** The tree as a list of lists, for screen readers and for reading: an ARIA tree, built as it opens. */

import { h, oneLine } from "./dom.js";
import { ROOT, SearchTree } from "./tree.js";

export class Outline {
  /** `pick(id)` hears which item was chosen. */
  constructor(pick) {
    this.pick = pick;
    this.tree = new SearchTree();
    this.list = h("ul", { role: "tree", "aria-label": "Steps of the tree", class: "outline" });
    this.list.addEventListener("click", (event) => this.click(event));
    this.list.addEventListener("keydown", (event) => this.key(event));
    this.items = new Map();
    this.open = new Set([ROOT]);
    this.current = ROOT;
  }

  show(tree) {
    this.tree = tree;
    this.items.clear();
    this.list.replaceChildren();
    this.open = new Set([ROOT]);
    this.current = ROOT;
    this.change();
  }

  /** Add what is new below open items and renew what is said of the others. */
  change() {
    this.renew(ROOT, this.list);
    this.items.get(this.current)?.setAttribute("tabindex", "0");
  }

  select(id) {
    for (const above of this.tree.path(id).slice(0, -1)) this.open.add(above);
    this.items.get(this.current)?.setAttribute("tabindex", "-1");
    this.items.get(this.current)?.setAttribute("aria-selected", "false");
    this.current = id;
    this.change();
    this.items.get(id)?.setAttribute("aria-selected", "true");
  }

  renew(id, parent) {
    const node = this.tree.nodes[id];
    const item = this.items.get(id) ?? this.make(id, parent);
    const said = describe(this.tree, node);
    if (item.firstChild.textContent !== said) {
      item.firstChild.textContent = said;
      item.setAttribute("aria-label", said);
    }
    if (!node.children.length) return;
    const open = this.open.has(id);
    item.setAttribute("aria-expanded", String(open));
    if (!open) {
      item.children[1]?.remove();
      return;
    }
    const group = item.children[1] ?? item.appendChild(h("ul", { role: "group" }));
    for (const child of node.children) this.renew(child, group);
  }

  make(id, parent) {
    const item = h("li", { role: "treeitem", tabindex: "-1", "aria-selected": "false", "data-node": id }, h("span", { class: "said" }));
    this.items.set(id, item);
    parent.append(item);
    return item;
  }

  toggle(id, open) {
    if (open) this.open.add(id);
    else {
      this.open.delete(id);
      for (const other of [...this.items.keys()]) {
        if (other !== id && this.tree.path(other).includes(id)) this.items.delete(other);
      }
    }
    this.change();
  }

  click(event) {
    const item = event.target.closest("[data-node]");
    if (!item) return;
    const id = Number(item.dataset.node);
    if (id === this.current) this.toggle(id, !this.open.has(id));
    this.choose(id);
  }

  choose(id) {
    this.select(id);
    this.items.get(id)?.focus();
    this.pick(id);
  }

  key(event) {
    const node = this.tree.nodes[this.current];
    const shown = [...this.list.querySelectorAll("[data-node]")].map((item) => Number(item.dataset.node));
    const at = shown.indexOf(this.current);
    const open = this.open.has(node.id) && node.children.length > 0;
    const actions = {
      ArrowDown: () => this.choose(shown[Math.min(at + 1, shown.length - 1)]),
      ArrowUp: () => this.choose(shown[Math.max(at - 1, 0)]),
      ArrowRight: () => (open ? this.choose(node.children[0]) : this.toggle(node.id, true)),
      ArrowLeft: () => (open ? this.toggle(node.id, false) : this.choose(Math.max(node.parent, ROOT))),
      Home: () => this.choose(ROOT),
      End: () => this.choose(shown[shown.length - 1]),
      Enter: () => this.choose(node.id),
    };
    if (!actions[event.key]) return;
    event.preventDefault();
    actions[event.key]();
  }
}

/** A node in one sentence. */
export function describe(tree, node) {
  if (node.id === ROOT) return `Question: ${oneLine(tree.nodes[ROOT].text, 200)}`;
  const parts = [];
  if (node.reward !== null) parts.push(`reward ${node.reward.toFixed(2)}`);
  if (node.id === tree.chosen) parts.push("chosen");
  else if (node.state !== "open") parts.push(node.state);
  const kv = tree.kvState(node);
  if (kv) parts.push(`KV ${kv}`);
  if (node.children.length) parts.push(node.children.length === 1 ? "1 child" : `${node.children.length} children`);
  return `${oneLine(node.text, 200)} (step ${node.id}${parts.length ? `, ${parts.join(", ")}` : ""})`;
}
