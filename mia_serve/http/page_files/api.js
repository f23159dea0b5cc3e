// Talks to the server: the key, JSON calls, the stream of an answer, and errors in words.

import { t } from "./strings.js";

const KEPT = "mia-key";
let key = "";
try { key = sessionStorage.getItem(KEPT) ?? ""; } catch { /* storage may be switched off: the key lasts as long as the page */ }

export const currentKey = () => key;

/** Keep a key for this tab; an empty one is forgotten. */
export function useKey(value) {
  key = value.trim();
  try {
    if (key) sessionStorage.setItem(KEPT, key);
    else sessionStorage.removeItem(KEPT);
  } catch { /* as above */ }
}

/** What the server refused; status 0: no answer at all. */
export class Refused extends Error {
  constructor(status, message = "", code = "", retry = null) {
    super(message);
    Object.assign(this, { status, code, retry });
  }
}

async function send(method, path, body, signal) {
  // Only printable ASCII may stand in a header; another key would fail inside fetch, as if the server were away.
  if (key && !/^[\x21-\x7e]+$/.test(key)) throw new Refused(401);
  const headers = { Accept: "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  if (body !== undefined) headers["Content-Type"] = "application/json";
  let response;
  try {
    const content = body === undefined ? undefined : JSON.stringify(body);
    response = await fetch(path, { method, headers, body: content, signal, cache: "no-store", credentials: "omit" });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Refused(0);
  }
  if (response.ok) return response;
  let told = {};
  try { told = (await response.json()).error ?? {}; } catch { /* a proxy's page, not ours */ }
  const retry = Number(response.headers.get("Retry-After")) || null;
  throw new Refused(response.status, typeof told.message === "string" ? told.message : "", told.code ?? "", retry);
}

/** Send a JSON request, return the JSON reply (null where there is none). */
export async function call(method, path, body, signal) {
  const response = await send(method, path, body, signal);
  const text = await response.text();
  try {
    return text ? JSON.parse(text) : null;
  } catch {
    throw new Refused(502);
  }
}

export const inside = (id, rest = "") => `v1/collections/${encodeURIComponent(id)}${rest}`;

/** Post and hand each server-sent event to `take(event, data)` as it arrives. */
export async function stream(path, body, take, signal) {
  const response = await send("POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let waiting = "";
  for (;;) {
    let part;
    try {
      part = await reader.read();
    } catch (error) {
      if (error.name === "AbortError") throw error;
      throw new Refused(0);
    }
    waiting += part.done ? "\n\n" : part.value;
    // A carriage return at the end may be half of a line's end: it waits for the next part.
    const whole = waiting.endsWith("\r") ? waiting.length - 1 : waiting.length;
    const blocks = (waiting.slice(0, whole).replaceAll("\r\n", "\n") + waiting.slice(whole)).split("\n\n");
    waiting = blocks.pop();
    for (const block of blocks) {
      const event = parse(block);
      if (event) take(event.name, event.data);
    }
    if (part.done) return;
  }
}

function parse(block) {
  let name = "message";
  const data = [];
  for (const line of block.split("\n")) {
    if (line.startsWith("event:")) name = line.slice(6).trim();
    else if (line.startsWith("data:")) data.push(line.slice(5).replace(/^ /, ""));
  }
  if (!data.length) return null;
  try { return { name, data: JSON.parse(data.join("\n")) }; } catch { return { name, data: null }; }
}

/** Say what went wrong and what to do: [sentence, the server's own words or ""]. */
export function words(error) {
  if (!(error instanceof Refused)) return [t("errPage"), String(error?.message ?? error)];
  const { status, message, code, retry } = error;
  if (status === 0) return [t("errAway"), ""];
  if (status === 401) return [t(currentKey() ? "errKey" : "errNoKey"), message];
  if (status === 403) return [t("errRole"), message];
  if (status === 404) return [t("errGone"), message];
  if (status === 409) return [t("errConflict"), message];
  if (status === 413) return [t("errLarge"), message];
  if (status === 429) return [retry ? t("errBusyFor", { n: Math.ceil(retry) }) : t("errBusy"), message];
  if (code === "not_ready") return [t("errStarting"), message];
  if (/^llm_|^no_language_model$/.test(code)) return [t("errModel"), message];
  if (status === 502 || status === 503) return [t("errDown"), message];
  if (status === 400 || status === 422) return [t("errAsked"), message];
  return [t("errServer", { status }), message];
}
