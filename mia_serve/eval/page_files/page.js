"use strict";
const DATA = JSON.parse(document.getElementById("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
const LABEL = Object.fromEntries(DATA.systems.map((s) => [s.key, s.label]));
const TERMS = [["query", "fits the question"], ["cover", "covers the pool"], ["spread", "adds something new"]];
const state = { question: null, system: null };

function el(name, attributes = {}, ...children) {
  const node = document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (key.startsWith("on")) node.addEventListener(key.slice(2), value);
    else node.setAttribute(key, value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

function shape(name, attributes, tip, action) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (tip) {
    node.addEventListener("mousemove", (event) => showTip(event.clientX, event.clientY, tip));
    node.addEventListener("mouseleave", hideTip);
  }
  if (action) node.addEventListener("click", action);
  return node;
}

const tipBox = document.getElementById("tip");
function showTip(x, y, text) {
  tipBox.textContent = text;
  tipBox.hidden = false;
  const box = tipBox.getBoundingClientRect();
  tipBox.style.left = Math.max(8, Math.min(x + 14, innerWidth - box.width - 8)) + "px";
  tipBox.style.top = (y + 18 + box.height > innerHeight ? y - box.height - 10 : y + 18) + "px";
}
function hideTip() { tipBox.hidden = true; }

const number = (value, digits = 3) =>
  value === null || value === undefined ? "–" : value.toFixed(digits).replace(/^(-?)0\./, "$1.");
const clip = (text, length) => (text.length > length ? text.slice(0, length).trimEnd() + " …" : text);

/* right, wrong, failed; a free answer is right from F1 .5 on */
function outcome(answer) {
  if (!answer) return "";
  if (answer.failed) return "failed";
  const { accuracy, f1, em } = answer.metrics;
  const value = accuracy ?? f1 ?? em;
  if (value === null || value === undefined) return "";
  return value >= 0.5 ? "right" : "wrong";
}

function verdict(answer) {
  const kind = outcome(answer);
  const shares = Object.entries(answer.metrics)
    .filter(([, value]) => typeof value === "number")
    .map(([name, value]) => `${name} ${number(value)}`);
  const word = kind === "failed" ? `failed: ${answer.failed}` : kind;
  return el("span", { class: `verdict ${kind}` }, [word, ...shares].filter(Boolean).join(" · "));
}

/* ---------------------------------------------------------------- the map of the book */

function layout(haystack) {
  let start = 0;
  const sessions = haystack.sessions.map((session) => {
    const placed = { ...session, start };
    start += session.chunks;
    return placed;
  });
  return { sessions, total: start };
}

/* Share of E1's softmax that falls to each session: how brightly it is lit. */
function activation(question, sessions) {
  const mass = new Map();
  if (!question.e1.length) return mass;
  const best = Math.max(...question.e1.map(([, score]) => score));
  let total = 0;
  for (const [chunk, score] of question.e1) {
    const weight = Math.exp((score - best) / 0.05);
    const session = sessionOf(sessions, chunk);
    mass.set(session, (mass.get(session) || 0) + weight);
    total += weight;
  }
  for (const [session, weight] of mass) mass.set(session, weight / total);
  return mass;
}

function sessionOf(sessions, chunk) {
  let low = 0, high = sessions.length - 1;
  while (low < high) {
    const middle = (low + high + 1) >> 1;
    if (sessions[middle].start <= chunk) low = middle; else high = middle - 1;
  }
  return low;
}

function chunkName(question, chunk) { return DATA.chunks[question.haystack][chunk]; }
function chunkText(question, chunk) { return (DATA.texts[question.haystack] || {})[chunk] || ""; }

function drawMap(question, part, small) {
  const haystack = DATA.haystacks[question.haystack];
  const { sessions, total } = layout(haystack);
  const width = 900, left = small ? 0 : 64, room = width - left;
  const x = (chunk) => left + (room * chunk) / total;
  const lanes = small ? { sessions: 14, hits: 34 } : { books: 0, sessions: 34, e1: 78, hits: 104, gold: 130 };
  const height = small ? 52 : 150;
  const svg = shape("svg", { class: "map", viewBox: `0 0 ${width} ${height}`, role: "img" });
  svg.setAttribute("aria-label", "Map of the book: sessions, pool, signature, hits and gold");
  const lit = activation(question, sessions);
  const pool = new Set(question.pool.length ? question.pool : lit.keys());
  const top = Math.max(0.0001, ...lit.values());
  if (!small) {
    for (const [lane, name] of [["sessions", "sessions"], ["e1", "E1"], ["hits", "found"], ["gold", "gold"]]) {
      if (lane === "gold" && !(question.gold && question.gold.length)) continue;
      const label = shape("text", { x: 0, y: lanes[lane] + (lane === "sessions" ? 20 : 12) });
      label.textContent = name;
      svg.append(label);
    }
    haystack.books.forEach((book, i) => {
      const own = sessions.filter((session) => session.book === i);
      if (!own.length) return;
      const from = x(own[0].start), to = x(own.at(-1).start + own.at(-1).chunks);
      svg.append(shape("line", { x1: from + 1, x2: to - 1, y1: 20, y2: 20, stroke: "currentColor", "stroke-opacity": 0.25 }));
      const characters = Math.floor((to - from) / 7);
      if (characters < 3) return;
      const title = shape("text", { class: "book", x: from + 1, y: 14 }, book.title);
      title.textContent = clip(book.title, characters);
      svg.append(title);
    });
  }
  const tall = small ? 14 : 28;
  sessions.forEach((session, i) => {
    const share = lit.get(i) || 0;
    const name = session.name || session.id;
    const tip = `${name}${session.name ? " · " + session.id : ""}\n${pool.has(i) ? `in the pool, ${(100 * share).toFixed(1)} % of E1's mass` : "not in the pool"}\n${clip(session.summary, 400)}`;
    const cell = shape("rect", { class: "session", x: x(session.start), y: lanes.sessions, width: Math.max(0.8, (room * session.chunks) / total), height: tall }, tip);
    if (pool.has(i)) cell.style.fill = `rgba(var(--lit), ${0.22 + 0.78 * Math.sqrt(share / top)})`;
    svg.append(cell);
  });
  const picks = part.signature ? part.signature.picks : [];
  const taken = [];
  picks.forEach((pick, i) => {
    if (pick.session < 0) return;
    const session = sessions[pick.session];
    const wide = Math.max(2, (room * session.chunks) / total);
    svg.append(shape("rect", { class: "chosen", x: x(session.start), y: lanes.sessions - 1.5, width: wide, height: tall + 3 }));
    const middle = x(session.start) + wide / 2;
    const level = taken.filter((other) => Math.abs(other - middle) < 12).length % 2;
    taken.push(middle);
    const mark = shape("text", { class: "number", x: small && level ? middle + 10 : middle, y: small ? lanes.sessions - 3 : lanes.sessions + (level ? tall / 2 + 4 : tall + 13) });
    mark.textContent = i + 1;
    svg.append(mark);
  });
  const ticks = (hits, lane, kind, tallest) => {
    const scores = hits.map(([, score]) => score);
    const low = Math.min(...scores), high = Math.max(...scores);
    hits.forEach(([chunk, score], rank) => {
      const size = high > low ? tallest * (0.35 + (0.65 * (score - low)) / (high - low)) : tallest;
      const tip = `${chunkName(question, chunk)} · rank ${rank + 1}${score ? ` · ${number(score)}` : ""}\n${clip(chunkText(question, chunk), 300)}`;
      svg.append(shape("rect", { class: kind, x: x(chunk) + (room / total) / 2 - 1, y: lane + tallest - size, width: 2.4, height: size }, tip));
    });
  };
  if (!small) ticks(question.e1, lanes.e1, "e1", 16);
  ticks(part.hits, lanes.hits, "e2", small ? 12 : 16);
  if (!small) {
    for (const chunk of question.gold || []) {
      const middle = x(chunk) + room / total / 2;
      svg.append(shape("path", { class: "gold", d: `M${middle} ${lanes.gold} l5 9 h-10 z` }, `gold · ${chunkName(question, chunk)}\n${clip(chunkText(question, chunk), 300)}`));
    }
  }
  return svg;
}

function legend(question) {
  const item = (style, text) => el("span", {}, el("i", { style }), text);
  return el("div", { class: "legend" },
    item("background: var(--rail)", "session"),
    item("background: rgba(var(--lit), .85)", "pool: brighter where E1 finds more"),
    item("border: 2px solid var(--sigma)", "signature σ, numbered in order of choice"),
    item("background: var(--e1)", "E1's best chunks"),
    item("background: var(--e2)", "chunks given to the answer"),
    question.gold && question.gold.length ? item("background: var(--gold)", "gold") : null);
}

/* ---------------------------------------------------------------- parts of a question */

function drawPicks(question, signature) {
  const { sessions } = layout(DATA.haystacks[question.haystack]);
  const largest = Math.max(0.0001, ...signature.picks.map((pick) => pick.gain || 0));
  const list = el("ol", { class: "picks" });
  signature.picks.forEach((pick, i) => {
    const session = sessions[pick.session];
    const gain = el("div", { class: "gain" });
    if (pick.gain !== null) {
      gain.append(el("small", {}, `gain ${number(pick.gain)}`));
      if (pick.terms) {
        const stack = el("div", { class: "stack", style: `width: ${(100 * pick.gain) / largest}%` });
        const parts = pick.terms.map((term, t) => term * DATA.weights[t]);
        const sum = parts.reduce((a, b) => a + b, 0) || 1;
        parts.forEach((value, t) => stack.append(el("i", { class: TERMS[t][0], style: `width: ${(100 * value) / sum}%`, title: `${TERMS[t][1]}: ${number(value)}` })));
        gain.append(stack, el("small", {}, parts.map((value, t) => `${TERMS[t][1]} ${number(value)}`).join(" · ")));
      }
    }
    const words = session ? session.summary : pick.text || "";
    list.append(el("li", {}, el("span", { class: "n" }, String(i + 1)),
      el("div", {}, session ? el("small", {}, [session.name, session.id].filter(Boolean).join(" · ")) : null, words), gain));
  });
  return list;
}

function drawFacts(question, facts) {
  if (!facts.length) return null;
  return el("ol", { class: "facts-list" }, ...facts.map((fact) =>
    el("li", {}, fact.text, fact.sources.length ? el("small", { class: "none" }, "  [" + fact.sources.map((c) => chunkName(question, c)).join(", ") + "]") : null)));
}

function drawChunks(question, hits) {
  const gold = new Set(question.gold || []);
  const first = new Map(question.e1.map(([chunk], rank) => [chunk, rank + 1]));
  return el("div", {}, ...hits.map(([chunk, score], rank) =>
    el("details", {},
      el("summary", {}, `${rank + 1}. ${chunkName(question, chunk)} `, gold.has(chunk) ? el("span", { class: "tag" }, "gold") : null,
        el("span", { class: "score" }, `${first.has(chunk) ? `E1 rank ${first.get(chunk)} · ` : ""}${score ? number(score) : ""}`)),
      el("p", {}, chunkText(question, chunk) || "(the text was not kept)"))));
}

function nameOf(pick, sessions) { return pick.session >= 0 ? sessions[pick.session].id : clip(pick.text || "", 60); }

function drawSteps(question, steps) {
  const { sessions } = layout(DATA.haystacks[question.haystack]);
  const list = el("ol", { class: "steps" });
  let before = null;
  steps.forEach((step, i) => {
    const names = step.signature ? step.signature.picks.map((pick) => nameOf(pick, sessions)) : [];
    const entry = el("li", {}, el("b", {}, `Step ${i + 1}: `), step.query, el("div", { class: "scroll" }, drawMap(question, step, true)));
    if (before !== null) {
      const came = names.filter((name) => !before.includes(name)), went = before.filter((name) => !names.includes(name));
      entry.append(el("div", { class: "moved" }, came.length || went.length
        ? el("span", {}, came.length ? el("b", {}, "σ gained " + came.join(", ")) : "", came.length && went.length ? "; " : "", went.length ? "lost " + went.join(", ") : "")
        : "σ stayed"));
    }
    before = names;
    entry.append(el("div", {}, step.failed ? el("span", { class: "verdict failed" }, `update failed: ${step.failed}; nothing changed`)
      : el("span", { class: "moved" }, `${step.decision || ""}${step.decision === "REFINE" && step.next ? " → " + step.next : ""}`)));
    const facts = drawFacts(question, step.evidence);
    if (facts) entry.append(facts);
    list.append(entry);
  });
  return list;
}

function showQuestion(question, system) {
  state.question = question;
  const keys = Object.keys(question.answers);
  state.system = keys.includes(system) ? system : keys[0];
  const answer = question.answers[state.system];
  const haystack = DATA.haystacks[question.haystack];
  const book = haystack.books.find((b) => b.id === question.book);
  const tabs = el("div", { class: "tabs", role: "tablist" }, ...keys.map((key) =>
    el("button", { role: "tab", "aria-selected": String(key === state.system), onclick: () => showQuestion(question, key) },
      el("span", { class: `dot ${outcome(question.answers[key])}` }), LABEL[key])));
  const page = document.getElementById("question");
  page.replaceChildren(
    el("h2", {}, question.text),
    el("p", { class: "meta" }, [book ? book.title : question.book, question.task, question.id].filter(Boolean).join(" · ")));
  if (question.options.length)
    page.append(el("ol", { class: "options" }, ...question.options.map((text, i) => {
      const letter = String.fromCharCode(65 + i);
      return el("li", { class: letter === question.label ? "gold" : null }, `${letter}. ${text}`);
    })));
  if (question.references.length) page.append(el("p", { class: "reference" }, "Right: ", el("b", {}, question.references.join(" / "))));
  page.append(tabs, el("p", {}, "Answer: ", el("b", {}, answer.prediction ?? "none"), "  ", verdict(answer)));
  if (answer.reply && answer.reply.trim() !== (answer.prediction || "").trim())
    page.append(el("details", {}, el("summary", {}, "The whole reply"), el("div", { class: "reply" }, answer.reply)));
  page.append(el("h3", {}, "The map of the book"), el("div", { class: "scroll" }, drawMap(question, answer, false)), legend(question));
  if (answer.steps.length) page.append(el("h3", {}, "How the agent went on"), drawSteps(question, answer.steps));
  if (answer.signature && answer.signature.picks.length)
    page.append(el("h3", {}, `Signature σ${answer.signature.mode ? ` (${answer.signature.mode.replaceAll("_", " ")})` : ""}`), drawPicks(question, answer.signature));
  const facts = drawFacts(question, answer.evidence);
  if (facts && !answer.steps.length) page.append(el("h3", {}, "Evidence"), facts);
  if (answer.hits.length) page.append(el("h3", {}, "Chunks given to the answer"), drawChunks(question, answer.hits));
  for (const button of document.querySelectorAll("#list button")) button.setAttribute("aria-current", String(button.dataset.id === question.id));
  history.replaceState(null, "", "#" + encodeURIComponent(question.id));
}

/* ---------------------------------------------------------------- the list */

const search = document.getElementById("search"), systemBox = document.getElementById("system"), outcomeBox = document.getElementById("outcome");
systemBox.append(el("option", { value: "" }, "any system"), ...DATA.systems.map((s) => el("option", { value: s.key }, s.label)));

function matches(question) {
  const kinds = Object.entries(question.answers).filter(([key]) => !systemBox.value || key === systemBox.value).map(([, answer]) => outcome(answer));
  const words = search.value.toLowerCase().split(/\s+/).filter(Boolean);
  const text = [question.text, question.book, question.id, ...question.references, ...Object.values(question.answers).map((a) => a.prediction || "")].join(" ").toLowerCase();
  if (!words.every((word) => text.includes(word))) return false;
  if (!outcomeBox.value) return true;
  if (outcomeBox.value === "differs") return new Set(Object.values(question.answers).map(outcome)).size > 1;
  return kinds.includes(outcomeBox.value);
}

function fillList() {
  const found = DATA.questions.filter(matches);
  document.getElementById("count").textContent = `${found.length} of ${DATA.questions.length} questions`;
  document.getElementById("list").replaceChildren(...found.map((question) =>
    el("li", {}, el("button", { "data-id": question.id, "aria-current": String(state.question === question), onclick: () => showQuestion(question, systemBox.value || state.system) },
      el("span", { class: "dots" }, ...Object.entries(question.answers).map(([key, answer]) => el("span", { class: `dot ${outcome(answer)}`, title: `${LABEL[key]}: ${outcome(answer)}` }))),
      clip(question.text, 140), el("small", {}, question.book)))));
}

for (const box of [search, systemBox, outcomeBox]) box.addEventListener("input", fillList);
document.addEventListener("keydown", (event) => {
  if (!state.question || event.target.matches("input, select") || !["j", "k"].includes(event.key)) return;
  const found = DATA.questions.filter(matches);
  const next = found[found.indexOf(state.question) + (event.key === "j" ? 1 : -1)];
  if (next) showQuestion(next, state.system);
});
fillList();
const start = DATA.questions.find((question) => "#" + encodeURIComponent(question.id) === location.hash) || DATA.questions[0];
if (start) showQuestion(start, DATA.systems.map((s) => s.key).reverse().find((key) => start.answers[key]));
