/** One search as the page sees it: asked for, growing, then done, stopped or failed. */

import { follow, ServerError } from "./stream.js";
import { noteOf, readTree, SearchTree } from "./tree.js";

export class Run {
  /** `before`: the run and node that it branched from. */
  constructor({ title, question, url = "v1/search", body = {}, before = null }) {
    this.title = title;
    this.question = question;
    this.before = before;
    this.url = url;
    this.body = body;
    this.tree = new SearchTree(question);
    this.state = "waiting";
    this.document = null;
    this.error = null;
    this.id = null;
    this.stopper = new AbortController();
  }

  /** A run that was exported earlier, or any document of a search. Throws what is wrong with it. */
  static opened(document, name) {
    const tree = readTree(document);
    const run = new Run({ title: titleOf(document) || name, question: tree.nodes[0].text });
    run.tree = tree;
    run.state = document.playground?.state ?? "done";
    run.document = document.answers ? document : null;
    run.id = document.id ?? null;
    return run;
  }

  /** Search, calling `changed` after every event; never rejects. */
  async start(key, changed) {
    try {
      await follow(this.url, this.body, key, this.stopper.signal, (name, data) => {
        this.id ??= data.id;
        if (name === "done") {
          this.document = data;
          this.state = "done";
        } else {
          this.state = "growing";
          this.tree.hear(data);
        }
        changed();
      });
    } catch (error) {
      this.state = error.name === "AbortError" ? "stopped" : "failed";
      this.error = error instanceof ServerError ? error.message : `Something went wrong: ${error.message}`;
    }
    this.tree.growing.clear();
    changed();
  }

  stop() {
    this.stopper.abort();
  }

  get running() {
    return this.state === "waiting" || this.state === "growing";
  }

  /** The search's document with its tree, and what only the page knows under `playground`. */
  export() {
    const head = this.document ?? {
      object: "search",
      status: this.state,
      messages: [{ role: "user", content: this.question }],
    };
    const note = { ...noteOf(this.tree), state: this.state };
    return { ...head, tree: this.tree.toJson(), playground: note };
  }
}

function titleOf({ policy, width, seed }) {
  return policy ? `${policy} ${width}, seed ${seed}` : "";
}
