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
    this.recorded = false;
    this.field = null; // of the request, that the server refused
    this.begun = null; // on the page's clock, in milliseconds
    this.ended = null;
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
    this.begun = performance.now();
    try {
      await follow(this.url, this.body, key, this.stopper.signal, (name, data) => {
        this.hear(name, data);
        changed();
      });
    } catch (error) {
      this.state = error.name === "AbortError" ? "stopped" : "failed";
      this.error = error instanceof ServerError ? error.message : `Something went wrong: ${error.message}`;
      this.field = error.field ?? null;
    }
    this.ended = performance.now();
    this.tree.growing.clear();
    changed();
  }

  /** Show a recording, `[milliseconds, event, data]` each; all of it at once where nothing is to move. */
  async replay(events, still, changed) {
    this.recorded = true;
    this.begun = performance.now();
    for (const [at, name, data] of events) {
      if (!still) await until(this.begun + at, this.stopper.signal);
      if (this.stopper.signal.aborted) break;
      this.hear(name, { event: name, ...data });
      changed();
    }
    if (this.running) this.state = "stopped";
    this.ended = performance.now();
    this.tree.growing.clear();
    changed();
  }

  hear(name, data) {
    this.id ??= data.id;
    if (name === "done") {
      this.document = data;
      this.state = "done";
    } else {
      this.state = "growing";
      this.tree.hear(data);
    }
  }

  /** How long it has taken so far, or took in all; null for one out of a file without its costs. */
  get seconds() {
    if (this.document?.stats) return this.document.stats.seconds;
    return this.begun === null ? null : ((this.ended ?? performance.now()) - this.begun) / 1000;
  }

  /** What searched, in a word. */
  get policy() {
    return this.document?.policy ?? this.body.search?.policy ?? this.title;
  }

  /** Refused before anything grew. */
  get refused() {
    return this.state === "failed" && !this.tree.size;
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

function until(moment, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, Math.max(0, moment - performance.now()));
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    });
  });
}

function titleOf({ policy, width, seed }) {
  return policy ? `${policy} ${width}, seed ${seed}` : "";
}
