/** One search on the page: its tree, and everything that is said of it. */

import { accounts, answerBars, kvChart } from "./charts.js";
import { details } from "./details.js";
import { count, h, oneLine, whole } from "./dom.js";
import { save } from "./files.js";
import { describe, Outline } from "./outline.js";
import { treeSvg } from "./svg.js";
import { TreeView } from "./view.js";

const PANELS_MS = 250;

export class Pane {
  /** `branch(pane, run, node)` continues a search; `say(text)` tells a screen reader. */
  constructor({ branch, say }) {
    this.branch = branch;
    this.say = say;
    this.runs = [];
    this.run = null;
    this.selected = null;
    this.view = new TreeView(
      (id) => this.pick(id, "view"),
      () => this.detailBox.querySelector("h3")?.focus(),
    );
    this.outline = new Outline((id) => this.pick(id, "outline"));
    this.build();
  }

  build() {
    const tool = (label, words, action) =>
      h("button", { type: "button", class: "tool", title: words, "aria-label": words, on: { click: action } }, label);
    this.title = h("h2", {}, "");
    this.crumbs = h("nav", { class: "crumbs", "aria-label": "Searches and their branches" });
    this.status = h("p", { class: "status" });
    this.alert = h("p", { class: "alert", role: "alert", hidden: true });
    this.exports = [
      tool("JSON", "Export the tree as JSON", () => this.exportJson()),
      tool("SVG", "Export the tree as SVG", () => this.exportSvg()),
    ];
    const tools = h(
      "div",
      { class: "tools", role: "toolbar", "aria-label": "Tree" },
      tool("−", "Shrink the tree", () => this.view.zoom(0.8)),
      tool("+", "Magnify the tree", () => this.view.zoom(1.25)),
      tool("Fit", "Show the whole tree", () => this.view.fit()),
      this.exports,
    );
    this.answerBox = h("section", { class: "panel answers", "aria-label": "Answers" });
    this.detailBox = h("section", { class: "panel details", "aria-label": "Selected step" });
    this.replyBox = h("section", { class: "panel reply", "aria-label": "Reply" });
    this.kvBox = h("section", { class: "panel kv", "aria-label": "KV cache over the rounds" });
    this.accountBox = h("section", { class: "panel tokens", "aria-label": "Token accounting" });
    this.outlineBox = h(
      "details",
      { class: "panel text" },
      h("summary", {}, "The tree as text"),
      this.outline.list,
    );
    this.element = h(
      "section",
      { class: "pane", "aria-label": "Search" },
      h("header", {}, h("div", {}, this.title, this.crumbs), tools),
      this.alert,
      this.status,
      h("div", { class: "stage" }, this.view.canvas),
      h(
        "div",
        { class: "panels" },
        this.answerBox,
        this.detailBox,
        this.replyBox,
        this.kvBox,
        this.accountBox,
      ),
      this.outlineBox,
    );
  }

  /** Show a run and, while it grows, what becomes of it. `history`: the runs it stems from. */
  async start(run, key, history = []) {
    this.runs = [...history, run];
    this.show(run);
    await run.start(key, () => this.run === run && this.changed());
    this.say(this.summary(run));
  }

  open(run) {
    this.runs = [run];
    this.show(run);
  }

  show(run) {
    this.run = run;
    this.selected = null;
    this.title.textContent = run.title;
    this.element.setAttribute("aria-label", `Search ${run.title}`);
    this.view.show(run.tree);
    this.outline.show(run.tree);
    this.renderCrumbs();
    this.render();
  }

  changed() {
    this.view.change();
    this.renderStatus();
    if (!this.run.running) this.render();
    else this.timer ??= setTimeout(() => this.render(), PANELS_MS);
  }

  pick(id, from) {
    if (id === undefined || id === null) return;
    this.selected = id;
    if (from !== "view") this.view.select(id);
    if (from !== "outline") this.outline.select(id);
    this.renderDetails();
    if (from === "view") this.say(describe(this.run.tree, this.run.tree.nodes[id]));
  }

  render() {
    clearTimeout(this.timer);
    this.timer = undefined;
    this.renderStatus();
    this.renderAnswers();
    this.renderDetails();
    this.renderKv();
    const { document } = this.run;
    this.accountBox.hidden = !document?.stats;
    if (document?.stats) this.accountBox.replaceChildren(h("h3", {}, "Tokens"), accounts(document));
    this.outline.change();
  }

  renderStatus() {
    const { run } = this;
    this.element.dataset.state = run.state;
    this.element.dataset.nodes = run.tree.size;
    this.status.textContent = this.summary(run);
    this.alert.hidden = run.state !== "failed";
    this.alert.textContent = run.state === "failed" ? run.error : "";
    for (const button of this.exports) button.disabled = !run.tree.size;
  }

  summary(run) {
    const { tree, document } = run;
    if (run.state === "waiting") return "Waiting for its turn…";
    const counts = tree.counts();
    const grown = `${count(tree.size, "step")}, ${whole(counts.tokens)} tokens, ${whole(counts.finished)} finished`;
    if (run.state === "growing") return `Round ${tree.round}: ${grown}`;
    if (run.state === "stopped") return `Stopped after ${grown}.`;
    if (run.state === "failed") return tree.size ? `Failed after ${grown}.` : "";
    if (!document) return grown;
    const rounds = `${count(document.stats.rounds, "round")}, ${document.stats.seconds.toFixed(1)} s`;
    return `Done (${document.stop_reason.replaceAll("_", " ")}): ${grown}, ${rounds}`;
  }

  renderAnswers() {
    const { document, tree } = this.run;
    this.answerBox.hidden = !document && tree.answer === null;
    this.replyBox.hidden = !document?.text;
    if (!document) return;
    const by = document.vote ? h("span", { class: "quiet" }, ` by ${document.vote.replaceAll("_", " ")}`) : null;
    this.answerBox.replaceChildren(h("h3", {}, "Answers", by), answerBars(document, (id) => this.pick(id, "answer")));
    this.replyBox.replaceChildren(
      h("h3", {}, "Reply"),
      h("pre", { class: "step long", tabindex: "0", "aria-label": "Text of the reply" }, document.text.trim()),
    );
  }

  renderDetails() {
    if (this.selected === null) {
      this.detailBox.replaceChildren(
        h("h3", {}, "Steps"),
        h("p", { class: "quiet" }, "Select a step in the tree to see its reward, its tokens and the way to it."),
      );
      return;
    }
    const box = details(
      this.run,
      this.selected,
      (id) => this.pick(id, "details"),
      (id) => this.branch(this, this.run, id),
    );
    this.detailBox.replaceChildren(box);
  }

  renderKv() {
    const { kv } = this.run.tree;
    this.kvBox.hidden = !kv.length;
    if (kv.length) this.kvBox.replaceChildren(h("h3", {}, "KV cache"), kvChart(kv));
  }

  renderCrumbs() {
    this.crumbs.hidden = this.runs.length < 2;
    const items = this.runs.map((run) => {
      const name = run.before ? `branch from step ${run.before.node}` : "whole search";
      const current = run === this.run ? "true" : null;
      return h("button", { type: "button", class: "link", "aria-current": current, on: { click: () => this.show(run) } }, name);
    });
    this.crumbs.replaceChildren(...items);
  }

  exportJson() {
    save(`${this.fileName()}.json`, JSON.stringify(this.run.export()), "application/json");
  }

  exportSvg() {
    const title = `${oneLine(this.run.question, 70)} · ${this.run.title}`;
    save(`${this.fileName()}.svg`, treeSvg(this.run.tree, title), "image/svg+xml");
  }

  fileName() {
    return `hedgerow-${this.run.title.replace(/[^a-z0-9]+/gi, "-")}`;
  }
}
