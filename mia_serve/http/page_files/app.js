// The page: chooses a collection, asks, and shows what comes back.

import { wireAdding } from "./add.js";
import { showAnswer } from "./answer.js";
import { Refused, call, currentKey, inside, useKey, words } from "./api.js";
import { byId, clip, el } from "./dom.js";
import { brightness, describe, drawMap } from "./map.js";
import { drawHits, drawPicks, picksOf } from "./results.js";
import { count, switchLanguage, t, writeWords } from "./strings.js";

const state = {
  collections: [], // what the server lists
  chosen: null, // the one that is asked
  model: false, // whether a language model answers
  map: null, // what drawMap shows
  found: null, // {search, before, seconds} of the last question
  shown: null, // the σ and hits on the map, where they are another step's than the search's
  asking: null, // AbortController of a question under way
};

/* ---------------------------------------------------------------- what is said */

function complain(error) {
  const box = byId("error");
  const [said, detail] = typeof error === "string" ? [error, ""] : words(error);
  box.replaceChildren(said, detail ? el("small", {}, detail) : "");
  box.hidden = false;
  if (!(error instanceof Refused)) return;
  if (error.status === 401) openKey(true);
  if (error.status === 404) listCollections().catch(() => null);
}

const quiet = () => (byId("error").hidden = true);
const say = (text) => (byId("status").textContent = text);

/* ---------------------------------------------------------------- the key */

function openKey(open) {
  byId("key-box").hidden = !open;
  byId("key-open").setAttribute("aria-expanded", String(open));
  if (open) byId("key").focus();
}

byId("key-open").addEventListener("click", () => openKey(byId("key-box").hidden));
byId("key-box").addEventListener("submit", async (event) => {
  event.preventDefault();
  useKey(byId("key").value);
  openKey(false);
  byId("key-open").focus();
  say(t(currentKey() ? "keyKept" : "keyGone"));
  await start();
});

/* ---------------------------------------------------------------- collections */

/** The collection that the address names behind its #. */
function named() {
  try { return decodeURIComponent(location.hash.slice(1)); } catch { return ""; }
}

addEventListener("hashchange", () => named() !== state.chosen?.id && listCollections(named()).catch(complain));

async function listCollections(wanted = state.chosen?.id ?? named()) {
  const { collections } = await call("GET", "v1/collections");
  state.collections = collections;
  const select = byId("collection");
  select.replaceChildren(...(collections.length
    ? collections.map((of) => el("option", { value: of.id }, of.title || of.id))
    : [el("option", { value: "" }, t("noCollections"))]));
  select.disabled = !collections.length;
  const found = collections.find((of) => of.id === wanted) ?? collections[0] ?? null;
  if (found) select.value = found.id;
  await choose(found);
}

async function choose(collection) {
  const other = collection?.id !== state.chosen?.id;
  state.chosen = collection;
  if (other) forget();
  aboutCollection();
  if (!collection) {
    byId("map-box").hidden = true;
    state.map = null;
    return;
  }
  history.replaceState(null, "", "#" + encodeURIComponent(collection.id));
  const map = await call("GET", inside(collection.id, "/map"));
  if (state.chosen !== collection) return; // another was chosen in the meantime
  const sessions = map.books.flatMap((book, i) => book.sessions.map((session) => ({ ...session, book: i })));
  state.map = {
    title: collection.title || collection.id, books: map.books, sessions, version: map.version,
    at: new Map(sessions.map((session, i) => [session.id, i])), open: openPlace, focused: null, chosen: null,
  };
  byId("map-box").hidden = !sessions.length;
  drawAll();
}

function aboutCollection() {
  const of = state.chosen;
  byId("about").textContent = of
    ? t("about", {
      chunks: count(of.chunks), sessions: count(of.sessions), summarizer: of.summarizer,
      books: of.books === 1 ? t("book") : t("books", { n: count(of.books) }),
    })
    : t("start");
  byId("delete-line").hidden = !of;
  askBeforeDeleting(false);
}

/* The first click asks, the second deletes; going elsewhere takes the question back. */
function askBeforeDeleting(asking) {
  byId("delete").dataset.sure = asking;
  byId("delete").textContent = asking ? t("removeSure", { title: clip(state.chosen.title || state.chosen.id, 60) }) : t("remove");
}

byId("delete").addEventListener("click", async () => {
  if (byId("delete").dataset.sure !== "true") return askBeforeDeleting(true);
  quiet();
  state.asking?.abort();
  try {
    await call("DELETE", inside(state.chosen.id));
    await listCollections("");
    say(t("removed"));
    byId("collection").focus();
  } catch (error) {
    complain(error);
  }
});
byId("delete").addEventListener("blur", () => state.chosen && askBeforeDeleting(false));

byId("collection").addEventListener("change", (event) => {
  state.asking?.abort();
  quiet();
  choose(state.collections.find((of) => of.id === event.target.value)).catch(complain);
});

/* ---------------------------------------------------------------- drawing */

function forget() {
  state.found = state.shown = null;
  if (state.map) state.map.chosen = null;
  for (const id of ["answer-box", "sigma-box", "hits-box", "session"]) byId(id).hidden = true;
  say("");
}

const tally = (hits) => {
  const by = new Map();
  for (const hit of hits) by.set(hit.session_id, (by.get(hit.session_id) ?? 0) + 1);
  return by;
};

const nameOf = (id) => {
  const map = state.map, at = map?.at.get(id);
  if (at === undefined) return id;
  const session = map.sessions[at], book = map.books[session.book];
  const place = at - map.sessions.findIndex((other) => other.book === session.book) + 1;
  return `${map.books.length > 1 ? clip(book.title || book.id, 24) + " " : ""}§ ${place}`;
};

const picksFound = () =>
  state.found ? picksOf(state.found.search.signature, state.found.search.explanation, summaryOf) : [];
const poolFound = () =>
  (state.found?.search.explanation?.pool ?? []).map((entry) => ({ id: entry.session_id, score: entry.score }));

/** Draw the map: as the last search left it, or as a step of the agent sees it. */
function drawBook(fresh = false) {
  const { map, found, shown } = state;
  if (!map || !map.sessions.length) return;
  const pool = poolFound();
  Object.assign(map, {
    fresh, asked: Boolean(found), pool, lit: brightness(pool),
    picks: shown ? shown.picks : picksFound().map((pick) => pick.id).filter((id) => id !== null),
    before: shown ? new Map() : tally(found?.before ?? []),
    after: shown ? tally(shown.hits.map((id) => ({ session_id: id }))) : tally(found?.search.hits ?? []),
  });
  drawMap(byId("map"), map);
  drawLegend();
  drawSession();
  byId("sigma-show").hidden = !shown;
}

/** Draw what the last search found: σ, the hits, and the line that sums them up. */
function drawFound() {
  if (!state.found || !state.map) return;
  const { search, before, seconds } = state.found;
  const picks = picksFound(), pool = poolFound();
  byId("sigma-box").hidden = !picks.length;
  byId("sigma-note").textContent = t(picks.some((pick) => pick.gain !== null) ? "sigmaWhy" : "sigmaGiven");
  drawPicks(byId("picks"), picks, nameOf, openSession);
  byId("hits-box").hidden = !search.hits.length;
  const same = before.length === search.hits.length && before.every((hit, i) => hit.id === search.hits[i].id);
  byId("hits-note").textContent = before.length ? t("hitsNote") + (same ? " " + t("unchanged") : "") : "";
  drawHits(byId("hits"), before, search.hits, search.explanation?.scores ?? {}, nameOf, openSession);
  const told = { hits: search.hits.length, seconds: seconds.toFixed(2), pool: pool.length, all: state.map.sessions.length, picks: picks.length };
  say(t(!search.hits.length ? "foundNone" : picks.length ? "found" : "foundPlain", told));
}

function drawAll() {
  drawBook();
  drawFound();
}

const summaryOf = (id) => state.map?.sessions[state.map.at.get(id)]?.summary ?? "";

function drawLegend() {
  const { asked, before } = state.map;
  const item = (kind, name) => el("span", {}, el("i", { class: kind }), t(name));
  byId("legend").replaceChildren(item("session-key", "legSession"), ...(asked
    ? [item("pool-key", "legPool"), item("sigma-key", "legSigma"),
      ...(before.size ? [item("before-key", "legBefore"), item("after-key", "legAfter")] : [item("after-key", "legHits")])]
    : []));
}

byId("sigma-show").addEventListener("click", () => {
  state.shown = null;
  drawBook();
});

function openPlace(i) {
  state.map.chosen = state.map.chosen === i ? null : i;
  state.map.focused = i;
  for (const cell of byId("map").querySelectorAll(".session"))
    cell.setAttribute("aria-selected", String(cell.id === `cell-${state.map.chosen}`));
  drawSession();
}

function openSession(id) {
  const i = state.map?.at.get(id);
  if (i === undefined) return;
  state.map.chosen = null;
  openPlace(i);
  byId("map-box").scrollIntoView({ block: "nearest" });
  byId("session").focus();
}

function drawSession() {
  const map = state.map, box = byId("session");
  box.hidden = map.chosen === null;
  if (box.hidden) return box.replaceChildren();
  const session = map.sessions[map.chosen];
  const close = el("button", { type: "button", class: "link close", onclick: closeSession }, t("close"));
  box.tabIndex = -1;
  box.replaceChildren(close, el("small", {}, describe(map, map.chosen)), el("p", {}, session.summary || t("noSummary")));
}

function closeSession() {
  openPlace(state.map.chosen);
  byId("map").firstChild.focus();
}

/* ---------------------------------------------------------------- asking */

async function ask() {
  const question = byId("question").value.trim();
  quiet();
  if (!state.chosen) return complain(t("noBook"));
  if (!question) {
    byId("question").focus();
    return complain(t("empty"));
  }
  state.asking?.abort();
  const run = (state.asking = new AbortController());
  forget();
  drawBook();
  busy(true);
  say(t("searching"));
  const mode = byId("sigma").value, answering = state.model ? byId("answering").value : "";
  try {
    const searched = search(question, mode, run.signal);
    const answered = answering ? answer(question, answering, mode, run.signal) : null;
    const outcomes = await Promise.allSettled([searched, answered]);
    if (state.asking !== run) return; // a newer question took over
    const failed = outcomes.find((outcome) => outcome.status === "rejected");
    if (failed) throw failed.reason;
  } catch (error) {
    if (state.asking !== run) return;
    if (error.name === "AbortError") say(t("stopped"));
    else {
      say("");
      complain(error);
    }
  } finally {
    if (state.asking === run) {
      state.asking = null;
      busy(false);
      if (document.querySelector(".reply.waiting")) byId("answer-box").hidden = true; // it was stopped before a word came
    }
  }
}

const hitsWanted = () => Math.max(1, Math.min(50, Math.round(Number(byId("k").value)) || 10));

async function search(question, sigma, signal) {
  const started = performance.now();
  const k = hitsWanted();
  const path = inside(state.chosen.id, "/search");
  const whole = { query: question, k, mode: byId("mode").value, signature: sigma, explain: true };
  // What the question alone finds is asked for too: the explanation names those hits, this holds their texts.
  const alone = { query: question, k, mode: "dense", encoder: "e1", signature: "none" };
  const [reply, plain] = await Promise.all([
    call("POST", path, whole, signal), sigma === "none" ? null : call("POST", path, alone, signal),
  ]);
  if (reply.version !== state.map?.version) await listCollections(); // somebody wrote in the meantime
  // Without a signature there is nothing to compare: BM25 alone reads none.
  state.found = { search: reply, before: (reply.signature && plain?.hits) || [], seconds: (performance.now() - started) / 1000 };
  drawBook(true);
  drawFound();
}

async function answer(question, mode, sigma, signal) {
  const view = {
    nameOf, open: openSession,
    light(picks, hits) {
      state.shown = { picks, hits };
      drawBook();
    },
  };
  const request = { collection: state.chosen.id, question, mode, k: hitsWanted() };
  if (mode === "static" || sigma === "none") request.signature = sigma; // an agent starts with σ of its own
  await showAnswer(request, view, signal);
}

function busy(on) {
  byId("go").textContent = t(on ? "stop" : "ask");
  byId("go").classList.toggle("stop", on);
  byId("ask-box").setAttribute("aria-busy", String(on));
}

byId("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.asking && document.activeElement !== byId("question")) state.asking.abort();
  else ask();
});
byId("question").addEventListener("keydown", (event) => {
  // While an input method is composing, Enter chooses a character.
  if (event.key !== "Enter" || event.shiftKey || event.isComposing || event.keyCode === 229) return;
  event.preventDefault();
  ask();
});
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape" || event.isComposing || byId("add").open) return;
  byId("tip").hidden = true;
  if (!byId("key-box").hidden) {
    openKey(false);
    byId("key-open").focus();
  } else if (state.asking) state.asking.abort();
  else if (state.map && state.map.chosen !== null) closeSession();
});

/* ---------------------------------------------------------------- the whole */

byId("language").addEventListener("click", () => {
  switchLanguage();
  writeAll();
});

function writeAll() {
  writeWords();
  busy(Boolean(state.asking));
  aboutCollection();
  if (!state.collections.length) byId("collection").replaceChildren(el("option", { value: "" }, t("noCollections")));
  drawAll();
}

async function start() {
  quiet();
  try {
    await Promise.all([listCollections(), findModel()]);
  } catch (error) {
    complain(error);
    if (error.code === "not_ready") setTimeout(start, 2000);
  }
}

async function findModel() {
  state.model = (await call("GET", "page/server.json")).llm;
  byId("answer-choice").hidden = !state.model;
}

let width = 0;
new ResizeObserver(([entry]) => {
  const now = Math.floor(entry.contentRect.width);
  if (now === width) return;
  width = now;
  drawBook();
}).observe(byId("map"));

wireAdding({
  collections: () => state.collections,
  chosen: () => state.chosen,
  async added(id, whole) {
    quiet();
    state.chosen = null;
    await listCollections(id).catch(complain);
    if (whole) {
      say(t("added"));
      byId("question").focus();
    }
  },
});
writeAll();
await start();
document.documentElement.dataset.ready = "true";
