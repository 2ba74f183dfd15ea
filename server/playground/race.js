/** Two searches on one clock and one token meter. */

import { h, oneLine, whole } from "./dom.js";

const EVERY_MS = 100;
const COLUMNS = ["Policy", "Answer", "Tokens", "Seconds"];

export class Race {
  constructor() {
    this.runs = [];
    this.rows = h("tbody", {});
    this.element = h(
      "section",
      { class: "race", "aria-label": "Both searches", hidden: true },
      h(
        "table",
        {},
        h("thead", {}, h("tr", {}, COLUMNS.map((name) => h("th", { scope: "col", class: name === "Answer" ? "said" : null }, name)))),
        this.rows,
      ),
    );
  }

  /** Of one search nothing is told: its own head says it. */
  show(runs) {
    this.runs = runs;
    this.element.hidden = runs.length < 2;
    this.render();
  }

  render() {
    clearTimeout(this.timer);
    if (this.element.hidden) return;
    const tokens = this.runs.map((run) => run.tree.counts().tokens);
    const seconds = this.runs.map((run) => run.seconds ?? 0);
    const most = [Math.max(...tokens, 1), Math.max(...seconds, 0.001)];
    const rows = this.runs.map((run, i) =>
      h(
        "tr",
        {},
        h("th", { scope: "row" }, run.policy),
        h("td", { class: "said" }, answerOf(run)),
        h("td", {}, meter(tokens[i] / most[0], whole(tokens[i]))),
        h("td", {}, meter(seconds[i] / most[1], seconds[i].toFixed(1))),
      ),
    );
    this.rows.replaceChildren(...rows);
    if (this.runs.some((run) => run.running)) this.timer = setTimeout(() => this.render(), EVERY_MS);
  }
}

function answerOf(run) {
  if (run.running) return "…";
  const answer = run.document?.answer ?? run.tree.answer;
  return answer === null ? "none" : oneLine(answer, 60);
}

function meter(share, words) {
  const bar = h("i", { "aria-hidden": "true" });
  bar.style.width = `${Math.max(100 * share, 1)}%`;
  return h("span", { class: "meter" }, h("span", { class: "track" }, bar), h("b", {}, words));
}
