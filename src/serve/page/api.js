// Requests to the server. Every failure is a `Failure` with a text and a hint.

export class Failure extends Error {
  constructor(error, hint, status) {
    super(error);
    this.hint = hint || "";
    this.status = status || 0;
  }
}

const KEY = "prsmed-token";
let askForToken = null;

/** `ask(reason)` must resolve to a token; it is called when the server wants one. */
export function onTokenNeeded(ask) {
  askForToken = ask;
}

function headers(more) {
  const token = sessionStorage.getItem(KEY);
  return token ? { ...more, Authorization: `Bearer ${token}` } : { ...more };
}

async function failure(response) {
  try {
    const { error, hint } = await response.json();
    return new Failure(error, hint, response.status);
  } catch {
    return new Failure(`the server answered with status ${response.status}`, "", response.status);
  }
}

/** Sends a request; resolves to the response if it succeeded. */
export async function request(path, { method = "GET", body, json, signal } = {}) {
  const type = json === undefined ? {} : { "Content-Type": "application/json" };
  const content = json === undefined ? body : JSON.stringify(json);
  let response;
  try {
    response = await fetch(path, { method, body: content, headers: headers(type), signal });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failure("the server does not answer", "check that `prsmed serve` runs, then try again");
  }
  if (response.status === 401 && askForToken) {
    const { message } = await failure(response);
    sessionStorage.setItem(KEY, await askForToken(message));
    return request(path, { method, body, json, signal });
  }
  if (!response.ok) throw await failure(response);
  return response;
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

export async function getBlob(path, options) {
  return (await request(path, options)).blob();
}

/** Asks a question: an object, or a form with a mask. `on(event, data)` receives the events of the server until the last one. */
export async function ask(image, question, signal, on) {
  const content = question instanceof FormData ? { body: question } : { json: question };
  const response = await request(`api/images/${image}/questions`, { method: "POST", ...content, signal });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    rest += value;
    let end;
    while ((end = rest.indexOf("\n\n")) >= 0) {
      dispatch(rest.slice(0, end), on);
      rest = rest.slice(end + 2);
    }
  }
}

function dispatch(text, on) {
  let name = "message";
  let data = "";
  for (const line of text.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    if (line.startsWith("data:")) data += line.slice(5);
  }
  if (data) on(name, JSON.parse(data));
}

/** Lets the browser save content under a name. */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
}
