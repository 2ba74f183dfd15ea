/** The page: a question, how to search, and one or two panes that show what comes of it. */

import { h } from "./dom.js";
import { readSearches } from "./files.js";
import { Pane } from "./pane.js";
import { Run } from "./run.js";
import { ask } from "./stream.js";

const SEEDS = 2 ** 31;
const KEY = "hedgerow.key";
const MORE = [
  ["temperature", "Temperature", Number, "1"],
  ["max_depth", "Most steps", parseInt, "25"],
  ["max_kv_tokens", "KV budget", parseInt, "none"],
  ["deadline_ms", "Deadline, ms", parseInt, "none"],
  ["expansions", "Expansions", parseInt, "64"],
  ["branch", "Children", parseInt, "3"],
];

const at = (id) => document.getElementById(id);
const page = { facts: null, panes: [], running: 0, turn: {} };

function say(text) {
  at("live").textContent = text;
}

function complain(text) {
  at("trouble").textContent = text;
  at("trouble").hidden = !text;
}

function key() {
  return at("key").value.trim();
}

/** What the form asks for, as `search` of a request. */
function dials(policy) {
  const search = { policy, width: Number(at("width").value) };
  if (at("budget").value) search.max_tokens = Number(at("budget").value);
  for (const [name, , read] of MORE) {
    const { value } = at(`dial-${name}`);
    if (value) search[name] = read(value);
  }
  return search;
}

function seed() {
  const given = at("seed").value.trim();
  return given ? Number(given) : Math.floor(Math.random() * SEEDS);
}

function laidOut(number) {
  while (page.panes.length < number) page.panes.push(new Pane({ branch, say }));
  const panes = page.panes.slice(0, number);
  at("empty").hidden = true;
  at("panes").replaceChildren(...panes.map((pane) => pane.element));
  at("panes").classList.toggle("two", number === 2);
  return panes;
}

async function search() {
  complain("");
  const question = at("question").value.trim();
  if (!question) {
    complain("Type a question first, or take one of the examples.");
    at("question").focus();
    return;
  }
  stopAll();
  const drawn = seed();
  const policies = [at("policy").value];
  if (at("compare").checked) policies.push(at("other").value);
  const panes = laidOut(policies.length);
  await underWay(
    panes.map((pane, i) => {
      const body = { question, search: { ...dials(policies[i]), seed: drawn } };
      const title = `${policies[i]} ${body.search.width}, seed ${drawn}`;
      return pane.start(new Run({ title, question, body }), key());
    }),
  );
}

/** Continue a search from a node, with a seed of its own. */
async function branch(pane, run, node) {
  const drawn = seed();
  const { policy, width } = run.document;
  const next = new Run({
    title: `${policy} ${width}, seed ${drawn}`,
    question: run.question,
    url: `v1/search/${encodeURIComponent(run.id)}/branch`,
    body: { node, search: { seed: drawn } },
    before: { run, node },
  });
  const history = pane.runs.slice(0, pane.runs.indexOf(run) + 1);
  await underWay([pane.start(next, key(), history)]);
}

/** While anything runs, the button stops it. */
async function underWay(work) {
  page.running += work.length;
  tellRunning();
  await Promise.all(work);
  page.running -= work.length;
  tellRunning();
}

function tellRunning() {
  const busy = page.running > 0;
  at("run").hidden = busy;
  at("stop").hidden = !busy;
}

function stopAll() {
  for (const pane of page.panes) for (const run of pane.runs) if (run.running) run.stop();
}

async function open(file) {
  complain("");
  try {
    const searches = (await readSearches(file)).slice(0, 2);
    const runs = searches.map((found) => Run.opened(found, file.name));
    laidOut(runs.length).forEach((pane, i) => pane.open(runs[i]));
    if (runs[0].question) at("question").value = runs[0].question;
    say(`${file.name} is open.`);
  } catch (error) {
    complain(`That file cannot be opened: ${error.message}.`);
  }
}

function fillForm() {
  const { facts } = page;
  for (const id of ["policy", "other"]) {
    at(id).replaceChildren(...facts.policies.map((name) => h("option", { value: name }, name)));
  }
  at("policy").value = facts.policy;
  at("other").value = facts.policies.find((name) => name !== facts.policy && name === "ets") ?? facts.policies[0];
  at("width").value = facts.width;
  at("width").max = facts.max_width;
  at("version").textContent = facts.version;
  at("keyrow").hidden = !facts.key_needed;
  at("key").value = sessionStorage.getItem(KEY) ?? "";
  at("examples").append(...Object.entries(facts.examples).map(example));
  at("question").value ||= Object.values(facts.examples)[0][0];
  at("dials").append(
    ...MORE.map(([name, label, , preset]) =>
      h("label", {}, label, h("input", { id: `dial-${name}`, type: "number", step: "any", min: "0", placeholder: preset })),
    ),
  );
}

/** A button that offers a task's questions in turn. */
function example([task, questions]) {
  const next = () => {
    const turn = page.turn[task] ?? 0;
    page.turn[task] = (turn + 1) % questions.length;
    at("question").value = questions[turn];
    at("question").focus();
  };
  return h("button", { type: "button", class: "chip", on: { click: next } }, task);
}

async function tellModel() {
  if (page.facts.key_needed && !key()) return;
  try {
    const { data } = await ask("v1/models", key());
    at("model").textContent = data[0].id;
  } catch (error) {
    complain(error.message);
  }
}

function listen() {
  at("form").addEventListener("submit", (event) => {
    event.preventDefault();
    search();
  });
  at("question").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) search();
  });
  at("stop").addEventListener("click", stopAll);
  at("compare").addEventListener("change", () => {
    at("otherrow").hidden = !at("compare").checked;
  });
  at("key").addEventListener("change", () => {
    sessionStorage.setItem(KEY, key());
    complain("");
    tellModel();
  });
  at("open").addEventListener("click", () => at("file").click());
  at("file").addEventListener("change", () => {
    if (at("file").files.length) open(at("file").files[0]);
    at("file").value = "";
  });
  document.addEventListener("dragover", (event) => event.preventDefault());
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    if (event.dataTransfer.files.length) open(event.dataTransfer.files[0]);
  });
}

async function begin() {
  listen();
  try {
    page.facts = await ask("playground/facts.json", "");
  } catch (error) {
    complain(error.message);
    return;
  }
  fillForm();
  await tellModel();
}

begin();
