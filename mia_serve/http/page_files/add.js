// Adds a text to the server: reads a file or what was pasted, sends it part by part, tells how far it is.

import { Refused, call, inside, words } from "./api.js";
import { byId, el } from "./dom.js";
import { count, t } from "./strings.js";

const FIRST = 12_000, LARGEST = 200_000; // characters sent at once: the first time, and at most
const SECONDS = 4; // that a part is to take, so that there is progress to see and something to stop

/** Return where a part from `from` of at most `most` characters ends: behind a paragraph, a line or a sentence. */
export function partEnd(text, from, most) {
  if (text.length - from <= most) return text.length;
  const piece = text.slice(from, from + most);
  const behind = (mark) => (piece.includes(mark) ? piece.lastIndexOf(mark) + mark.length : 0);
  const ends = [["\n\n"], ["\n"], ["。", "！", "？", ". ", "! ", "? "], [" "]].map((marks) => Math.max(...marks.map(behind)));
  const end = ends.find((at) => at > most / 2) ?? most;
  // Never between the halves of one character.
  return from + (/[\ud800-\udbff]/.test(piece[end - 1]) ? end - 1 : end);
}

/** Read bytes as text: by their byte-order mark, as UTF-8, else as GB18030; null where they are no text. */
export function decoded(bytes) {
  const marks = [["utf-16le", 0xff, 0xfe], ["utf-16be", 0xfe, 0xff]];
  const marked = marks.find(([, first, second]) => bytes[0] === first && bytes[1] === second);
  for (const name of marked ? [marked[0]] : ["utf-8", "gb18030"]) {
    try {
      const text = new TextDecoder(name, { fatal: true }).decode(bytes);
      // What is no text may decode by chance; control characters give it away.
      const odd = (text.slice(0, 20_000).match(/[\u0000-\u0008\u000e-\u001f]/g) ?? []).length;
      if (odd <= text.length / 1000) return cleaned(text);
    } catch { /* the next one */ }
  }
  return null;
}

const cleaned = (text) => text.toWellFormed().replaceAll("\u0000", "").replaceAll("\r\n", "\n").replaceAll("\r", "\n");

/** Make an id that the server takes out of a title, not among those taken. */
export function idFor(title, taken) {
  const plain = title.normalize("NFKD").replace(/[̀-ͯ]/g, "").toLowerCase();
  const stem = plain.replace(/[^a-z0-9]+/g, "-").replace(/^-+|-+$/g, "").slice(0, 50) || "text";
  let id = stem;
  for (let n = 2; taken.has(id); n += 1) id = `${stem}-${n}`;
  return id;
}

/** Wire the dialog; `page.collections()`, `page.chosen()` and `page.added(id)` are the page's. */
export function wireAdding(page) {
  const dialog = byId("add"), stop = byId("add-stop");
  let running = null, fromFile = "", titled = "";

  byId("add-open").addEventListener("click", () => {
    tell(null);
    const chosen = page.chosen();
    byId("into-line").hidden = !chosen || chosen.kind !== "books";
    byId("into").checked = false;
    byId("into-words").textContent = chosen ? t("into", { title: chosen.title || chosen.id }) : "";
    measure();
    dialog.showModal();
    byId("name").focus();
  });
  stop.addEventListener("click", () => (running ? running.abort() : dialog.close()));
  dialog.addEventListener("cancel", (event) => {
    if (!running) return; // the browser closes it
    event.preventDefault();
    running.abort();
  });

  const measure = () => {
    const n = byId("text").value.length;
    byId("text-note").textContent = n ? t(n > 400_000 ? "sizeLong" : "size", { n: count(n) }) : "";
  };
  byId("text").addEventListener("input", measure);
  byId("file").addEventListener("change", async () => {
    const file = byId("file").files[0];
    if (file) await take(file);
  });
  const take = async (file) => {
    const text = decoded(new Uint8Array(await file.arrayBuffer()));
    tell(text === null ? t("badFile") : null);
    if (text === null) return;
    byId("text").value = fromFile = text;
    const name = file.name.replace(/\.[^.]*$/, "");
    if (!byId("name").value || byId("name").value === titled) byId("name").value = titled = name;
    measure();
  };
  for (const kind of ["dragover", "drop"])
    dialog.addEventListener(kind, (event) => {
      if (!event.dataTransfer?.types.includes("Files")) return;
      event.preventDefault();
      if (kind === "drop" && !running) take(event.dataTransfer.files[0]);
    });

  byId("add-form").addEventListener("submit", async (event) => {
    event.preventDefault();
    const text = cleaned(byId("text").value);
    if (running) return;
    if (!text.trim()) return tell(t("emptyText"));
    const title = byId("name").value.trim() || t("untitled");
    const into = byId("into").checked ? page.chosen().id : null;
    running = new AbortController();
    busy(true);
    const done = await addText(text, title, into, page, running.signal).finally(() => ((running = null), busy(false)));
    if (done.error) tell(...done.error);
    if (done.id) page.added(done.id, !done.error);
    if (done.error) return;
    dialog.close();
    for (const id of ["name", "text", "file"]) byId(id).value = "";
  });

  function busy(on) {
    for (const id of ["name", "file", "text", "into", "add-go"]) byId(id).disabled = on;
    byId("adding").hidden = !on;
    stop.textContent = t(on ? "stop" : "cancel");
    if (on) stop.focus();
  }
}

function tell(words, detail = "") {
  const box = byId("add-error");
  box.hidden = words === null;
  box.replaceChildren(...(words === null ? [] : [words, detail ? el("small", {}, detail) : ""]));
}

/** Send a text; returns {id, error}: the collection that holds some of it, and what went wrong. */
async function addText(text, title, into, page, signal) {
  const made = into === null;
  let id = into, sent = 0;
  const share = () => Math.floor((100 * sent) / text.length);
  try {
    if (made) {
      progress(0, t("sending", { share: 0 }));
      id = await create(title, page, signal);
    }
    // A book's id is new in its collection, so that two texts of one title are never taken for one.
    const book = idFor(title, made ? new Set() : await booksOf(id, signal));
    await sendParts(text, (part) => call("POST", inside(id, "/chunks"), { text: part, book_id: book, title }, signal),
      (to) => (sent = to), signal);
    return { id, error: null };
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (made && id !== null && !sent) await call("DELETE", inside(id)).catch(() => null); // an empty one is of no use
    const [said, detail] = stopped ? [t(sent ? "addStopped" : "stopped"), ""] : words(error);
    const part = sent && !stopped ? ` ${t("addedPart", { share: share() })}` : "";
    return { id: sent ? id : null, error: [said + part, detail] };
  }
}

/** Send part by part, each as long as the last one's speed lets it be; `reached(n)` hears of each that is added. */
async function sendParts(text, send, reached, signal) {
  const started = performance.now();
  let from = 0, most = FIRST;
  while (from < text.length) {
    const share = Math.floor((100 * from) / text.length);
    const passed = (performance.now() - started) / 1000;
    const left = from ? Math.ceil((passed * (text.length - from)) / from) : null;
    progress(from / text.length, left === null ? t("sending", { share }) : t("sendingLeft", { share, n: left }));
    const end = partEnd(text, from, most), part = text.slice(from, end), began = performance.now();
    const busy = (n) => progress(from / text.length, t("sendingWait", { share, n }));
    if (part.trim()) await patiently(() => send(part), busy, signal);
    const speed = part.length / Math.max(0.05, (performance.now() - began) / 1000);
    most = Math.round(Math.max(FIRST, Math.min(LARGEST, 3 * most, SECONDS * speed)));
    from = end;
    reached(from);
  }
}

async function create(title, page, signal) {
  const taken = new Set(page.collections().map((of) => of.id));
  for (;;) {
    const id = idFor(title, taken);
    try {
      await call("POST", "v1/collections", { id, title, kind: "books" }, signal);
      return id;
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 409 || taken.has(id)) throw error;
      taken.add(id); // made by somebody else in the meantime
    }
  }
}

async function booksOf(id, signal) {
  const map = await call("GET", inside(id, "/map"), undefined, signal);
  return new Set(map.books.map((book) => book.id));
}

/** Wait out a busy server, as often as it says when to come back. */
async function patiently(send, waits, signal) {
  for (let tries = 0; ; tries += 1) {
    try {
      return await send();
    } catch (error) {
      if (!(error instanceof Refused) || error.status !== 429 || tries >= 20) throw error;
      const seconds = Math.min(60, error.retry ?? 2);
      waits(Math.ceil(seconds));
      await new Promise((go, no) => {
        const clock = setTimeout(go, 1000 * seconds);
        signal.addEventListener("abort", () => (clearTimeout(clock), no(new DOMException("", "AbortError"))), { once: true });
      });
    }
  }
}

function progress(share, said) {
  byId("progress").value = share;
  byId("progress-words").textContent = said;
}
