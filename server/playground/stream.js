/** Asking the server: JSON calls, and searches followed event by event. */

/** What the server refused in words for a person; `field`: of the request, if one is at fault. */
export class ServerError extends Error {
  constructor(message, field = null) {
    super(message);
    this.field = field;
  }
}

const PLAIN = {
  invalid_api_key: "This server wants an API key, and does not know the one given.",
  search_not_found: "The server no longer keeps this search. Run it again, then branch from it.",
  engine_unavailable: "The engine is starting again. Try in a few seconds.",
  shutting_down: "The server is shutting down.",
};

/** An error's words for a person, from the server's JSON body. */
export function plainWords(body, status) {
  const error = body?.error;
  if (!error) return `The server answered with status ${status}.`;
  if (PLAIN[error.code]) return PLAIN[error.code];
  if (status === 429) return `The server is busy: ${error.message}.`;
  const text = error.message.charAt(0).toUpperCase() + error.message.slice(1);
  return text.endsWith(".") ? text : `${text}.`;
}

function headersOf(key) {
  return { "content-type": "application/json", ...(key ? { authorization: `Bearer ${key}` } : {}) };
}

async function reach(url, options) {
  try {
    return await fetch(url, options);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The server cannot be reached. Is it still running?");
  }
}

async function mustBeOk(response) {
  if (response.ok) return response;
  const body = await response.json().catch(() => null);
  throw new ServerError(plainWords(body, response.status), body?.error?.param ?? null);
}

/** What a GET of `url` answers. */
export async function ask(url, key) {
  return (await mustBeOk(await reach(url, { headers: headersOf(key) }))).json();
}

/**
 * POST `body` and tell each event of the stream; resolves when it has ended with `done`.
 * Rejects with ServerError, or with AbortError once `signal` has fired.
 */
export async function follow(url, body, key, signal, tell) {
  const options = {
    method: "POST",
    headers: headersOf(key),
    body: JSON.stringify({ ...body, stream: true }),
    signal,
  };
  const response = await mustBeOk(await reach(url, options));
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await read(reader);
    if (done) throw new ServerError("The stream ended before the search did.");
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = parse(block);
      if (event === null) continue;
      if (event.name === "error") throw new ServerError(plainWords(event.data, 500));
      tell(event.name, event.data);
      if (event.name === "done") return;
    }
  }
}

async function read(reader) {
  try {
    return await reader.read();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new ServerError("The connection to the server broke off.");
  }
}

function parse(block) {
  let name = "";
  let data = "";
  for (const line of block.split("\n")) {
    if (line.startsWith("event: ")) name = line.slice(7);
    if (line.startsWith("data: ")) data += line.slice(6);
  }
  return data ? { name, data: JSON.parse(data) } : null;
}
