/** One search on the page: its tree, and everything that is said of it. */

import { accounts, answerBars, kvChart } from "./charts.js";
import { details } from "./details.js";
import { count, h, oneLine, whole } from "./dom.js";
import { rewardColour } from "./colour.js";
import { save } from "./files.js";
import { describe, Outline } from "./outline.js";
import { treeSvg } from "./svg.js";
import { TreeView } from "./view.js";

const PANELS_MS = 250;

export class Pane {
  /**
   * `branch(pane, run, node)` continues a search; `say(text)` tells a screen reader; `grew()` hears
   * that a search did.
   */
  constructor({ branch, say, grew }) {
    this.branch = branch;
    this.say = say;
    this.grew = grew;
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
    this.title = h("h2", { tabindex: "-1" }, "");
    this.verdict = h("p", { class: "verdict", hidden: true });
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
    this.pathBox = h("section", { class: "panel reply", "aria-label": "The chosen reply" });
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
      h("header", {}, h("div", { class: "head" }, this.title, this.crumbs, this.verdict, this.status), tools),
      this.alert,
      h("div", { class: "stage" }, this.view.canvas),
      h(
        "div",
        { class: "panels" },
        this.pathBox,
        this.answerBox,
        this.detailBox,
        this.kvBox,
        this.accountBox,
      ),
      this.outlineBox,
    );
  }

  /**
   * Show a run and, while it grows, what becomes of it. `history`: the runs it stems from. A run
   * that is refused leaves what stood here before, if anything did.
   */
  async start(run, key, history = []) {
    const before = { runs: this.runs, run: this.run };
    this.runs = [...history, run];
    this.show(run);
    await run.start(key, () => this.run === run && !run.refused && this.changed());
    if (run.refused && this.run === run) {
      if (before.run) [this.runs, run] = [before.runs, before.run];
      this.show(run);
      return;
    }
    this.say(this.summary(run));
  }

  /** Show a recording as it grew. */
  async replay(run, events, still) {
    this.runs = [run];
    this.show(run);
    await run.replay(events, still, () => this.run === run && this.changed());
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
    this.grew();
  }

  changed() {
    this.view.change();
    this.grew();
    this.renderStatus();
    if (!this.run.running) this.render();
    else this.timer ??= setTimeout(() => this.render(), PANELS_MS);
  }

  /** Select a node; `from` says where, which keeps the keyboard's focus unless it goes with this. */
  pick(id, from) {
    if (id === undefined || id === null) return;
    this.selected = id;
    if (from !== "view") this.view.select(id);
    if (from !== "outline") this.outline.select(id);
    this.renderDetails();
    if (from === "view") this.say(describe(this.run.tree, this.run.tree.nodes[id]));
    if (from === "details") this.detailBox.querySelector("h3").focus();
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
    if (run.state === "failed") return tree.size ? `Failed after ${grown}.` : "Nothing was searched.";
    if (!document) return grown;
    const rounds = `${count(document.stats.rounds, "round")}, ${document.stats.seconds.toFixed(1)} s`;
    return `${run.recorded ? "Recorded" : "Done"} (${document.stop_reason.replaceAll("_", " ")}): ${grown}, ${rounds}`;
  }

  renderAnswers() {
    const { document } = this.run;
    this.renderVerdict();
    this.renderPath();
    this.answerBox.hidden = !document;
    if (!document) return;
    const by = document.vote ? h("span", { class: "quiet" }, ` by ${document.vote.replaceAll("_", " ")}`) : null;
    this.answerBox.replaceChildren(h("h3", {}, "Answers", by), answerBars(document, (id) => this.pick(id, "answer")));
  }

  /** The answer, and how many of the replies that hold one are for it. */
  renderVerdict() {
    const { document, tree } = this.run;
    const answer = document?.answer ?? tree.answer;
    this.verdict.hidden = !document;
    if (!document) return;
    if (answer === null) {
      this.verdict.replaceChildren("No answer: none of the replies came to one.");
      return;
    }
    const votes = document.answers.reduce((sum, one) => sum + one.count, 0);
    const own = document.answers.find((one) => one.answer === answer)?.count;
    const share = own === undefined ? "" : ` · ${own} of ${count(votes, "vote")}`;
    this.verdict.replaceChildren(h("strong", {}, oneLine(answer, 160)), h("span", { class: "quiet" }, share));
  }

  /** The chosen reply step by step, each with its reward; a step is a way to its details. */
  renderPath() {
    const { document, tree } = this.run;
    this.pathBox.hidden = tree.chosen === null && !document?.text;
    if (this.pathBox.hidden) return;
    const steps = tree.chosen === null ? [] : tree.path(tree.chosen).slice(1);
    const body = steps.length
      ? h("ol", { class: "steps" }, steps.map((id) => this.pathItem(tree.nodes[id])))
      : h("pre", { class: "step long", tabindex: "0", "aria-label": "Text of the reply" }, document.text.trim());
    this.pathBox.replaceChildren(h("h3", {}, "The chosen reply"), body);
  }

  pathItem(node) {
    const gauge = h("i", { "aria-hidden": "true" });
    gauge.style.background = rewardColour(node.reward, this.view.dark);
    const reward = node.reward === null ? "" : node.reward.toFixed(2);
    const tell = () => this.pick(node.id, "path");
    return h(
      "li",
      {},
      h("button", { type: "button", class: "pathstep", on: { click: tell } }, gauge, h("span", {}, node.text.trim()), h("b", {}, reward)),
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
