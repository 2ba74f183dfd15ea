/** A search tree as its events tell it, or as a document holds it. Knows nothing of the page. */

export const ROOT = 0;

function bud(id, parent, depth) {
  return {
    id,
    parent,
    depth,
    children: [],
    text: "",
    tokens: [],
    reward: null,
    logprob: 0,
    entropy: 0,
    state: "open",
    finish: "step",
    round: 0,
    kept: 0, // tokens of the step whose KV the engine holds, if it tells
    back: 0, // the round in which evicted KV was computed again
    released: false,
  };
}

export class SearchTree {
  constructor(question = "", prompt = []) {
    this.nodes = [bud(ROOT, -1, 0)];
    this.nodes[ROOT].text = question;
    this.prompt = prompt;
    this.round = 0;
    this.growing = new Set(); // what the round under way grows from
    this.chosen = null;
    this.answer = null;
    this.tellsKv = false;
    this.kv = []; // {round, active, inactive, capacity} after each round
    this.depth = 1; // of the deepest node
  }

  get size() {
    return this.nodes.length - 1;
  }

  /** Take in an event of `POST /v1/search`. */
  hear(event) {
    const node = this.nodes[event.node];
    switch (event.event) {
      case "started":
        this.prompt = event.prompt;
        break;
      case "selected":
        if (event.round !== this.round) this.growing.clear();
        this.round = event.round;
        this.growing.add(event.node);
        break;
      case "expanded":
        this.add(event);
        break;
      case "scored":
        node.reward = event.reward;
        break;
      case "finished":
      case "pruned":
        node.state = event.event;
        break;
      case "evicted":
        node.kept = event.kept;
        node.back = 0;
        node.released = event.reason === "dead";
        break;
      case "rehydrated":
        node.kept = event.kept;
        node.back = event.round;
        break;
      case "kv":
        this.tellsKv = true;
        this.kv.push({
          round: event.round,
          active: event.active_tokens,
          inactive: event.inactive_tokens,
          capacity: event.capacity_tokens,
        });
        break;
      case "answer":
        this.growing.clear();
        this.chosen = event.node;
        this.answer = event.answer;
        break;
    }
  }

  add(step) {
    const above = this.nodes[step.parent];
    const node = bud(step.node ?? step.id, step.parent, above.depth + 1);
    node.text = step.text;
    node.tokens = step.tokens;
    node.logprob = step.logprob;
    node.entropy = step.entropy;
    node.finish = step.finish;
    node.round = step.round ?? node.depth;
    node.kept = step.finish === "end" ? 0 : step.tokens.length; // nothing follows an end
    node.released = step.finish === "end";
    above.children.push(node.id);
    this.depth = Math.max(this.depth, node.depth);
    this.nodes.push(node);
    return node;
  }

  /** From the root down to a node, both included. */
  path(id) {
    const chain = [];
    for (let at = id; at !== -1; at = this.nodes[at].parent) chain.push(at);
    return chain.reverse();
  }

  /** What the round under way grows from, ancestors included; afterwards the chosen path. */
  highlighted() {
    const tips = this.growing.size ? [...this.growing] : this.chosen === null ? [] : [this.chosen];
    const found = new Set();
    for (const tip of tips) {
      for (let at = tip; at !== -1 && !found.has(at); at = this.nodes[at].parent) found.add(at);
    }
    return found;
  }

  counts() {
    const found = { open: 0, pruned: 0, finished: 0, depth: 0, tokens: 0 };
    for (const node of this.nodes.slice(1)) {
      found[node.state] += 1;
      found.depth = Math.max(found.depth, node.depth);
      found.tokens += node.tokens.length;
    }
    return found;
  }

  /** Held, partly evicted, evicted, released or just rehydrated; "" where nobody said. */
  kvState(node) {
    if (!this.tellsKv || node.id === ROOT) return "";
    if (node.back && node.back >= this.round - 1) return "just rehydrated"; // the next has begun
    if (node.kept >= node.tokens.length) return "held";
    if (node.kept > 0) return "partly evicted";
    return node.released ? "released" : "evicted";
  }

  /** As `tree` of a search's document. */
  toJson() {
    return {
      version: 1,
      prompt: this.prompt,
      nodes: this.nodes.slice(1).map((node) => ({
        id: node.id,
        parent: node.parent,
        tokens: node.tokens,
        text: node.text,
        finish: node.finish,
        state: node.state,
        reward: node.reward,
        logprob: node.logprob,
        entropy: node.entropy,
      })),
    };
  }
}

/** The tree of a document that a server sent or this page exported. Throws what is wrong with it. */
export function readTree(document) {
  const found = document?.tree;
  if (!found || !Array.isArray(found.nodes)) throw new Error("the file holds no search tree");
  if (found.version !== 1) throw new Error(`tree version ${found.version} is not known here`);
  const tree = new SearchTree(questionOf(document), found.prompt ?? []);
  for (const step of found.nodes) {
    if (step.id !== tree.nodes.length || !(step.parent >= 0 && step.parent < step.id)) {
      throw new Error(`node ${step.id} stands where node ${tree.nodes.length} should`);
    }
    const node = tree.add({ ...step, tokens: step.tokens ?? [], text: String(step.text) });
    node.reward = step.reward;
    node.state = step.state;
  }
  tree.answer = document.answer ?? null;
  tree.chosen = chosenOf(tree, document);
  recall(tree, document.playground);
  return tree;
}

/** What only this page notes beside a document: the rounds, and what became of the KV. */
export function noteOf(tree) {
  return {
    rounds: tree.nodes.map((node) => node.round),
    kept: tree.tellsKv ? tree.nodes.map((node) => [node.kept, node.back, node.released]) : null,
    kv: tree.kv,
    chosen: tree.chosen,
  };
}

function recall(tree, note) {
  if (!note) return;
  tree.kv = note.kv ?? [];
  tree.tellsKv = Boolean(note.kept);
  for (const node of tree.nodes) {
    node.round = note.rounds?.[node.id] ?? node.round;
    if (note.kept?.[node.id]) [node.kept, node.back, node.released] = note.kept[node.id];
    tree.round = Math.max(tree.round, node.round);
  }
  tree.chosen = note.chosen ?? tree.chosen;
}

function questionOf(document) {
  const said = (document.messages ?? []).filter((message) => message.role === "user");
  return said.length ? said[said.length - 1].content : "";
}

/** The reply's node: that of the winning answer, or the one whose path reads like the reply. */
function chosenOf(tree, document) {
  const winner = (document.answers ?? []).find((answer) => answer.answer === document.answer);
  if (winner && winner.reply !== undefined) return winner.reply;
  const before = document.branched_from?.text ?? "";
  for (const node of tree.nodes) {
    const text = tree.path(node.id).slice(1).map((id) => tree.nodes[id].text).join("");
    if (node.state === "finished" && before + text === document.text) return node.id;
  }
  return null;
}
