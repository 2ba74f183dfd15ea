/** The page: a question, how to search, and one or two panes that show what comes of it. */

import { h } from "./dom.js";
import { readSearches } from "./files.js";
import { clearMarks, mark, MORE, readForm } from "./fields.js";
import { Pane } from "./pane.js";
import { Race } from "./race.js";
import { Run } from "./run.js";
import { ask } from "./stream.js";

const SEEDS = 2 ** 31;
const KEY = "hedgerow.key";
const at = (id) => document.getElementById(id);
const page = { facts: null, panes: [], race: new Race(), running: 0, turn: {}, recordings: [] };

function say(text) {
  at("live").textContent = text;
}

/** Say what is wrong, if anything is, and mark the field that is at fault. */
function complain(text, field = null) {
  at("trouble").textContent = text;
  at("trouble").hidden = !text;
  if (field) mark(field);
}

function key() {
  return at("key").value.trim();
}

function seed() {
  const given = at("seed").value.trim();
  return given ? Number(given) : Math.floor(Math.random() * SEEDS);
}

function laidOut(number) {
  const grew = () => page.race.render();
  while (page.panes.length < number) page.panes.push(new Pane({ branch, say, grew }));
  const panes = page.panes.slice(0, number);
  at("empty").hidden = true;
  at("panes").replaceChildren(...panes.map((pane) => pane.element));
  at("panes").classList.toggle("two", number === 2);
  return panes;
}

async function search() {
  const asked = readForm(page.facts);
  if (asked.wrong) {
    complain(asked.wrong.message, asked.wrong.field);
    return;
  }
  clearMarks();
  complain("");
  tellWhatIsKnown(asked.question);
  stopAll();
  const drawn = seed();
  const policies = [at("policy").value];
  if (at("compare").checked) policies.push(at("other").value);
  const panes = laidOut(policies.length);
  const runs = policies.map((policy) => {
    const body = { question: asked.question, search: { ...asked.search, policy, seed: drawn } };
    return new Run({ title: titled(policy, asked.search, drawn), question: asked.question, body });
  });
  const work = panes.map((pane, i) => pane.start(runs[i], key()));
  page.race.show(runs);
  comeIntoView(at("results"));
  await underWay(work);
  tellRefusal(runs);
}

/** Continue a search from a node, as the form says, with a seed of its own. */
async function branch(pane, run, node) {
  const asked = readForm(page.facts);
  if (asked.wrong) {
    complain(asked.wrong.message, asked.wrong.field);
    return;
  }
  const policy = at("policy").value;
  const given = seed();
  const drawn = given === run.document.seed ? given + 1 : given;
  const next = new Run({
    title: `${titled(policy, asked.search, drawn)}, from step ${node}`,
    question: run.question,
    url: `v1/search/${encodeURIComponent(run.id)}/branch`,
    body: { node, search: { ...asked.search, policy, seed: drawn } },
    before: { run, node },
  });
  const history = pane.runs.slice(0, pane.runs.indexOf(run) + 1);
  const work = pane.start(next, key(), history);
  page.race.show(page.panes.filter((one) => one.element.isConnected).map((one) => one.run));
  pane.title.focus();
  await underWay([work]);
  tellRefusal([next]);
}

/** The server chooses what `auto` stands for, its width too unless one is asked for. */
function titled(policy, { width }, seed) {
  const wide = width ?? (policy === "auto" ? "" : page.facts.width);
  return `${`${policy} ${wide}`.trim()}, seed ${seed}`;
}

/** Where the answer will stand below the fold, as on a phone: go there. */
function comeIntoView(element) {
  if (element.getBoundingClientRect().top < window.innerHeight / 2) return;
  element.scrollIntoView({ behavior: stillness() ? "auto" : "smooth" });
}

function stillness() {
  return matchMedia("(prefers-reduced-motion: reduce)").matches;
}

/** What the server would not search for, at the field that is at fault. */
function tellRefusal(runs) {
  const refused = runs.find((run) => run.refused);
  if (refused) complain(refused.error, refused.field);
}

/** Of a question that the bundled model was not taught: what it knows. */
function tellWhatIsKnown(question) {
  const { knows } = page.facts;
  const strange = knows.length > 0 && !knows.some((pattern) => new RegExp(pattern).test(question));
  at("hint").hidden = !strange;
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
    page.race.show(runs);
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
  at("width").placeholder = facts.width;
  at("version").textContent = facts.version;
  at("keyrow").hidden = !facts.key_needed;
  at("key").value = sessionStorage.getItem(KEY) ?? "";
  at("examples").append(...Object.entries(facts.examples).map(example));
  at("question").value ||= Object.values(facts.examples)[0][0];
  at("dials").append(
    ...MORE.map(({ id, label, preset }) =>
      h("label", {}, label, h("input", { id, type: "number", step: "any", placeholder: preset })),
    ),
  );
  at("hint").textContent =
    `${facts.model} was taught the four kinds of puzzle above and nothing else: ` +
    "to another question it answers at random. A model of yours answers what it can.";
}

/** Recorded searches: the page lives before a model is asked. */
async function offerRecordings() {
  try {
    page.recordings = await ask("playground/recorded.json", "");
  } catch (error) {
    complain(error.message);
    return;
  }
  const buttons = page.recordings.map((recording) =>
    h("button", { type: "button", class: "chip", on: { click: () => replay(recording) } }, recording.task),
  );
  at("recordings").replaceChildren(...buttons);
  at("empty").hidden = false;
}

/** Show it as it grew; its question goes into the form, unless one is being typed there. */
function replay({ title, question, events }, typed = false) {
  stopAll();
  const [pane] = laidOut(1);
  at("empty").hidden = false;
  page.race.show([]);
  if (!typed) at("question").value = question;
  return pane.replay(new Run({ title: `Recorded: ${title}`, question }), events, stillness());
}

/** A button that offers a task's questions in turn. */
function example([task, questions]) {
  const next = () => {
    const turn = page.turn[task] ?? 0;
    page.turn[task] = (turn + 1) % questions.length;
    at("question").value = questions[turn];
    at("hint").hidden = true;
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
  at("race").replaceWith(page.race.element);
  listen();
  try {
    page.facts = await ask("playground/facts.json", "");
  } catch (error) {
    complain(error.message);
    return;
  }
  fillForm();
  const offered = at("question").value;
  await Promise.all([offerRecordings(), tellModel()]);
  const [first] = page.recordings;
  const field = at("question");
  const typed = field.value !== offered || document.activeElement === field;
  if (first && !page.running && !page.panes.length) await replay(first, typed);
}

begin();
