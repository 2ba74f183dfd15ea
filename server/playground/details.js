/** What there is to know of one node, and the way back to the root. */

import { count, h, oneLine } from "./dom.js";
import { ROOT } from "./tree.js";

const ENDS = {
  step: "goes on",
  end: "ended the reply",
  limit: "met a limit",
  length: "was cut by length",
  empty: "empty",
  loop: "repeated its parent",
};
const CLOSED = new Set(["end", "empty", "loop"]);

/** `pick(id)` selects another node, `branch(id)` continues the search from this one. */
export function details(run, id, pick, branch) {
  const { tree } = run;
  const node = tree.nodes[id];
  if (id === ROOT) return rootDetails(run, branch);
  const facts = [
    ["Reward", node.reward === null ? "none" : node.reward.toFixed(4)],
    ["State", stateOf(tree, node)],
    ["Tokens", String(node.tokens.length)],
    ["KV", kvOf(tree, node)],
    ["Log-probability", node.logprob === null ? "not known" : `${node.logprob.toFixed(3)} a token`],
    ["Entropy", node.entropy === null ? "not known" : `${node.entropy.toFixed(3)} nats at the boundary`],
    ["Round", String(node.round)],
    ["Children", String(node.children.length)],
  ];
  return h(
    "div",
    {},
    h("h3", { tabindex: "-1" }, `Step ${id}`),
    h("pre", { class: "step", tabindex: "0", "aria-label": "Text of the step" }, node.text.trim() || "(empty)"),
    h("dl", { class: "facts" }, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
    branchButton(run, id, branch),
    wayHere(tree, id, pick),
  );
}

function wayHere(tree, id, pick) {
  const above = tree.path(id).slice(1, -1);
  if (!above.length) return null;
  return [h("h4", {}, "The way here"), h("ol", { class: "way" }, above.map((step) => wayItem(tree, step, pick)))];
}

function rootDetails(run, branch) {
  return h(
    "div",
    {},
    h("h3", { tabindex: "-1" }, "The question"),
    h("pre", { class: "step", tabindex: "0", "aria-label": "The question" }, run.question),
    run.before ? h("p", { class: "quiet" }, `This search goes on from step ${run.before.node} of the one before.`) : null,
    h("p", { class: "quiet" }, count(run.tree.prompt.length, "token"), " of prompt"),
    branchButton(run, ROOT, branch),
  );
}

function wayItem(tree, id, pick) {
  const node = tree.nodes[id];
  const reward = node.reward === null ? "" : `${node.reward.toFixed(2)} `;
  return h("li", {}, h("button", { type: "button", class: "link", on: { click: () => pick(id) } }, reward + oneLine(node.text, 60)));
}

function branchButton(run, id, branch) {
  const why = whyNot(run, id);
  return h(
    "div",
    { class: "act" },
    h("button", { type: "button", class: "branch", disabled: why !== "", on: { click: () => branch(id) } }, "Branch from here"),
    why ? h("p", { class: "quiet" }, why) : null,
  );
}

function whyNot(run, id) {
  if (run.running) return "Wait until this search is done.";
  if (!run.id || !run.document) return "This search did not end with an answer, so the server did not keep it.";
  if (id !== ROOT && CLOSED.has(run.tree.nodes[id].finish)) return "This step ended; nothing follows it.";
  return "";
}

function stateOf(tree, node) {
  if (node.id === tree.chosen) return "chosen reply";
  if (node.state === "open") return tree.growing.has(node.id) ? "growing" : "open";
  return `${node.state}, ${ENDS[node.finish] ?? node.finish}`;
}

function kvOf(tree, node) {
  const state = tree.kvState(node);
  return state ? `${node.kept} of ${node.tokens.length} tokens, ${state}` : "not told";
}
