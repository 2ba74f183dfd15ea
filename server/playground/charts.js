/** Small figures: KV over the rounds, votes as bars, tokens by what became of them. */

import { count, h, oneLine, s, whole } from "./dom.js";

const WIDE = 420;
const HIGH = 132;
const EDGE = { left: 44, right: 8, top: 10, bottom: 24 };

/** KV held after each round, what the round grew from apart from the rest; an SVG figure. */
export function kvChart(series) {
  const most = Math.max(...series.map((point) => point.active + point.inactive), 1);
  const last = series[series.length - 1];
  const first = series[0].round;
  const span = Math.max(last.round - first, 1);
  const x = (round) => EDGE.left + ((round - first) / span) * (WIDE - EDGE.left - EDGE.right);
  const y = (tokens) => HIGH - EDGE.bottom - (tokens / most) * (HIGH - EDGE.bottom - EDGE.top);
  const area = (low, high) => {
    const there = series.map((point) => `${x(point.round)},${y(high(point))}`);
    const back = series.map((point) => `${x(point.round)},${y(low(point))}`).reverse();
    return `M${there.join("L")}L${back.join("L")}Z`;
  };
  const said =
    `KV over ${count(series.length, "round")}: at most ${whole(most)} tokens held, ` +
    `${whole(last.active)} active and ${whole(last.inactive)} inactive at the end`;
  const grid = [0, 0.5, 1].map((share) => [
    s("line", { class: "grid", x1: EDGE.left, x2: WIDE - EDGE.right, y1: y(most * share), y2: y(most * share) }),
    s("text", { class: "tick", x: EDGE.left - 6, y: y(most * share) + 4, "text-anchor": "end" }, whole(most * share)),
  ]);
  return h(
    "figure",
    { class: "chart" },
    s(
      "svg",
      { viewBox: `0 0 ${WIDE} ${HIGH}`, role: "img", "aria-label": said },
      grid,
      s("path", { class: "active", d: area(() => 0, (point) => point.active) }),
      s("path", { class: "inactive", d: area((point) => point.active, (point) => point.active + point.inactive) }),
      s("text", { class: "tick", x: EDGE.left, y: HIGH - 6 }, `round ${first}`),
      s("text", { class: "tick", x: WIDE - EDGE.right, y: HIGH - 6, "text-anchor": "end" }, `round ${last.round}`),
    ),
    h(
      "figcaption",
      {},
      h("span", { class: "key active" }, "active"),
      h("span", { class: "key inactive" }, "inactive"),
      h("span", { class: "quiet" }, `of ${whole(last.capacity)} tokens`),
    ),
  );
}

/** The answers with their votes, the heaviest first; `pick(reply)` hears a click. */
export function answerBars(document, pick) {
  const { answers } = document;
  if (!answers.length) return h("p", { class: "quiet" }, "No reply holds an answer.");
  const heaviest = Math.max(...answers.map((answer) => answer.weight), 1e-9);
  const shown = answers.slice(0, 8).map((answer) => {
    const won = answer.answer === document.answer;
    const bar = h("span", { class: "bar" });
    bar.style.width = `${Math.max((100 * answer.weight) / heaviest, 1)}%`;
    return h(
      "li",
      {},
      h(
        "button",
        { type: "button", class: won ? "vote won" : "vote", on: { click: () => pick(answer.reply) } },
        bar,
        h("span", { class: "name" }, oneLine(answer.answer, 120), won ? h("span", { class: "flag" }, "chosen") : null),
        h("span", { class: "tally" }, `${count(answer.count, "vote")} · ${answer.weight.toFixed(2)}`),
      ),
    );
  });
  const rest = answers.length - shown.length;
  return h(
    "div",
    {},
    h("ol", { class: "votes" }, shown),
    rest > 0 ? h("p", { class: "quiet" }, `and ${count(rest, "other answer")}`) : null,
    document.unanswered ? h("p", { class: "quiet" }, `${count(document.unanswered, "reply", "replies")} without an answer`) : null,
  );
}

/** Where the tokens went. */
export function accounts(document) {
  const { usage, stats } = document;
  const reply = stats.reply_tokens;
  const other = usage.completion_tokens - reply;
  const { engine } = stats;
  const share = h("div", { class: "split", "aria-hidden": "true" }, h("span"), h("span"));
  share.firstChild.style.width = `${(100 * reply) / Math.max(usage.completion_tokens, 1)}%`;
  const rows = [
    ["Prompt", `${whole(usage.prompt_tokens)} tokens`],
    ["In the reply", `${whole(reply)} tokens`],
    ["In other branches", `${whole(other)} tokens`],
    ["KV, all rounds", `${whole(stats.kv_tokens_total)} tokens`],
    ["KV at most", `${whole(engine.kv_tokens_peak)} tokens`],
    ["Rehydrated", `${whole(engine.rehydrated_tokens)} tokens`],
    ["Reward model", `${whole(engine.prm_tokens)} tokens`],
    ["Forward passes", whole(engine.model_calls)],
    ["Arithmetic", flops(engine.flops)],
    ["Time", `${stats.seconds.toFixed(2)} s, ${stats.policy_seconds.toFixed(3)} s of it planning`],
  ];
  return h(
    "div",
    {},
    share,
    h("dl", { class: "accounts" }, rows.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value)))),
  );
}

function flops(number) {
  const power = Math.min(Math.max(Math.floor(Math.log10(Math.max(number, 1)) / 3), 0), 6);
  return `${(number / 1000 ** power).toPrecision(3)} ${["", "k", "M", "G", "T", "P", "E"][power]}FLOP`;
}
