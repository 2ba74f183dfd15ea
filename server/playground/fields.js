/** The form's fields: what they ask for, and which of them is at fault. */

const at = (id) => document.getElementById(id);

/** Numbers of `search`: the element, what is allowed, and whether fractions are. */
export const MORE = [
  { name: "temperature", label: "Temperature", preset: "1", least: 0, most: 5, fractions: true },
  { name: "max_depth", label: "Most steps", preset: "25", least: 1, most: 200 },
  { name: "max_kv_tokens", label: "KV budget", preset: "none", least: 1 },
  { name: "deadline_ms", label: "Deadline, ms", preset: "none", least: 1 },
  { name: "expansions", label: "Expansions", preset: "64", least: 1 },
  { name: "branch", label: "Children", preset: "3", least: 1 },
].map((field) => ({ ...field, id: `dial-${field.name}` }));

/**
 * The question and `search` of a request; or `wrong`, the first field that is at fault by its name
 * in a request, and why. An empty number is left to the server.
 */
export function readForm(facts) {
  const question = at("question").value.trim();
  if (!question) {
    return { wrong: { field: "question", message: "Type a question first, or take one of the examples." } };
  }
  const search = {};
  for (const field of numbers(facts)) {
    const { value, validity } = at(field.id);
    if (!value && !validity.badInput) continue;
    const number = Number(value);
    if (!allowed(field, number, validity)) {
      return { wrong: { field: `search.${field.name}`, message: `${field.label}: ${range(field)}.` } };
    }
    search[field.name] = number;
  }
  return { question, search };
}

function numbers(facts) {
  return [
    { name: "width", id: "width", label: "Width", least: 1, most: facts.max_width },
    { name: "seed", id: "seed", label: "Seed", least: 0, most: Number.MAX_SAFE_INTEGER },
    { name: "max_tokens", id: "budget", label: "Token budget", least: 1 },
    ...MORE,
  ];
}

function allowed({ least, most = Infinity, fractions }, number, validity) {
  if (validity.badInput || !(number >= least && number <= most)) return false;
  return fractions || Number.isInteger(number);
}

function range({ least, most, fractions }) {
  const kind = fractions ? "a number" : "a whole number";
  return most === undefined || most > 1e9 ? `${kind} from ${least} on` : `${kind} from ${least} to ${most}`;
}

/** Mark the field that a request's `name` came from, and go there. */
export function mark(name) {
  clearMarks();
  const known = { question: "question", "search.max_tokens": "budget" };
  const last = name.split(".").pop();
  const field = at(known[name] ?? last) ?? at(`dial-${last}`);
  if (!field?.matches("input, select, textarea")) return;
  field.setAttribute("aria-invalid", "true");
  field.setAttribute("aria-describedby", "trouble");
  const folded = field.closest("details");
  if (folded) folded.open = true;
  field.focus();
}

export function clearMarks() {
  for (const field of document.querySelectorAll("form [aria-invalid]")) {
    field.removeAttribute("aria-invalid");
    field.removeAttribute("aria-describedby");
  }
}
