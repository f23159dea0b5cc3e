// The map of a collection: its sessions in rows, as wide as they have chunks, lit where the question finds most.

import { clip, number, shape, tip } from "./dom.js";
import { t } from "./strings.js";

const TEMPERATURE = 0.05; // of the softmax over E1's scores, as in the signature's coverage term
const CELL = 32, MARKS = 15, FOUND = 13, GAP = 9, TITLE = 17;

/** Return how brightly each session of the pool is lit, by id, the brightest 1. */
export function brightness(pool) {
  const scored = pool.filter((session) => Number.isFinite(session.score));
  if (!scored.length) return new Map(pool.map((session, i) => [session.id, 1 / (1 + i)]));
  const best = Math.max(...scored.map((session) => session.score));
  return new Map(scored.map((session) => [session.id, Math.sqrt(Math.exp((session.score - best) / TEMPERATURE))]));
}

/** Break cells into rows about `width` wide; each row is then stretched to it. */
export function breakRows(chunks, width) {
  const total = chunks.reduce((sum, n) => sum + n, 0) || 1;
  const least = chunks.length > 600 ? 7 : 14; // px of an average cell
  const wide = Math.min(64, Math.max(least, width / chunks.length)) * chunks.length;
  const rows = Math.max(1, Math.round(wide / width));
  const room = total / rows;
  const broken = [];
  let row = [], filled = 0, sum = 0;
  chunks.forEach((n, i) => {
    if (row.length && filled + n / 2 > room && broken.length < rows - 1) {
      broken.push(row);
      sum += filled;
      [row, filled] = [[], 0];
    }
    row.push(i);
    filled += n;
  });
  broken.push(row);
  return broken;
}

/** Draw the map; `view` has books, sessions, lit, picks, before and after (hits by session id), chosen and open(i). */
export function drawMap(box, view) {
  const width = Math.max(200, Math.floor(box.clientWidth));
  const { sessions, books } = view;
  const rows = breakRows(sessions.map((session) => session.chunks), width);
  const titled = books.length > 1;
  const tall = MARKS + CELL + FOUND + GAP + (titled ? TITLE : 0);
  const svg = shape("svg", {
    class: view.fresh ? "map fresh" : "map", width, height: rows.length * tall, viewBox: `0 0 ${width} ${rows.length * tall}`,
    role: "listbox", tabindex: "0", "aria-label": t("mapLabel", { title: view.title, n: sessions.length }),
  });
  rows.forEach((row, r) => {
    const total = row.reduce((sum, i) => sum + sessions[i].chunks, 0) || 1;
    const scale = Math.min(width / total, rows.length === 1 ? 64 : Infinity);
    const top = r * tall + (titled ? TITLE : 0);
    let x = 0;
    row.forEach((i, place) => {
      const wide = sessions[i].chunks * scale;
      if (titled && (place === 0 || sessions[i].book !== sessions[row[place - 1]].book))
        drawTitle(svg, view, row, place, x, top, scale);
      drawCell(svg, view, i, x, top, wide);
      x += wide;
    });
  });
  steer(svg, view, rows);
  const focused = box.contains(document.activeElement);
  box.replaceChildren(svg);
  if (focused) svg.focus();
}

function drawTitle(svg, view, row, place, x, top, scale) {
  const { sessions, books } = view;
  const book = sessions[row[place]].book;
  const wide = row.filter((i) => sessions[i].book === book).reduce((sum, i) => sum + sessions[i].chunks, 0) * scale;
  svg.append(shape("line", { class: "book-line", x1: x + 1, x2: x + wide - 2, y1: top + 1, y2: top + 1 }));
  const title = books[book].title || books[book].id;
  const units = Math.floor(wide / 6.6); // a Chinese character is about twice as wide as a letter
  const most = /[⺀-鿿豈-﫿]/.test(title) ? Math.floor(units / 2) : units;
  if (most < 3) return;
  svg.append(shape("text", { class: "book", x: x + 1, y: top - 4 }, clip(title, most)));
}

function drawCell(svg, view, i, x, top, wide) {
  const { sessions, lit, picks, before, after } = view;
  const session = sessions[i];
  const y = top + MARKS;
  const cell = shape("rect", {
    class: "session", id: `cell-${i}`, x, y, width: Math.max(0.8, wide), height: CELL, role: "option",
    "aria-selected": String(view.chosen === i), "aria-label": describe(view, i), "data-session": session.id,
  });
  const light = lit.get(session.id);
  if (light !== undefined) {
    cell.classList.add("lit");
    cell.style.fill = `rgba(var(--lit), ${(0.26 + 0.74 * light).toFixed(3)})`;
    cell.style.animationDelay = `${Math.round(240 * (1 - light))}ms`;
  }
  cell.addEventListener("click", () => view.open(i));
  tip(cell, () => `${describe(view, i)}\n${clip(session.summary || "", 320)}`);
  svg.append(cell);
  const order = picks.indexOf(session.id);
  if (order >= 0) {
    const frame = { class: "chosen", x: x + 0.5, y: y - 1, width: Math.max(3, wide - 1), height: CELL + 2, rx: 2 };
    svg.append(shape("rect", frame), shape("text", { class: "number", x: x + wide / 2, y: y - 4 }, String(order + 1)));
  }
  const half = Math.max(1.5, Math.min(7, wide / 2 - 1.5));
  for (const [hits, kind, from] of [[before, "before", x + wide / 2 - half - 0.5], [after, "after", x + wide / 2 + 0.5]]) {
    const n = Math.min(4, hits.get(session.id) ?? 0);
    if (n) svg.append(shape("rect", { class: kind, x: from, y: y + CELL + 3, width: half, height: 2 + 2.5 * (n - 1) + 1 }));
  }
}

/** Tell in words what the map shows of a session. */
export function describe(view, i) {
  const session = view.sessions[i];
  const order = view.picks.indexOf(session.id);
  const pooled = view.pool.find((entry) => entry.id === session.id);
  const score = pooled && Number.isFinite(pooled.score) ? ` (${t("brightness", { score: number(pooled.score) })})` : "";
  const before = view.before.get(session.id) ?? 0, after = view.after.get(session.id) ?? 0;
  const title = view.books.length > 1 ? view.books[session.book].title || view.books[session.book].id : "";
  return [
    title,
    t("sessionOf", { n: i + 1, all: view.sessions.length }),
    session.chunks === 1 ? t("chunk") : t("chunks", { n: session.chunks }),
    view.asked ? (pooled ? t("inPool") + score : t("notPool")) : "",
    order >= 0 ? t("chosenAs", { n: order + 1 }) : "",
    before || after ? t("hitsHere", { before, after }) : "",
  ].filter(Boolean).join(" · ");
}

/** One tab stop for the whole map; arrows move over its cells. */
function steer(svg, view, rows) {
  const place = (i) => { const r = rows.findIndex((row) => row.includes(i)); return [r, rows[r].indexOf(i)]; };
  const mark = (i) => {
    svg.querySelector(".focused")?.classList.remove("focused");
    const cell = svg.querySelector(`#cell-${i}`);
    cell.classList.add("focused");
    svg.setAttribute("aria-activedescendant", cell.id);
    view.focused = i;
  };
  svg.addEventListener("focus", () => mark(Math.min(view.focused ?? firstPick(view), view.sessions.length - 1)));
  svg.addEventListener("blur", () => svg.querySelector(".focused")?.classList.remove("focused"));
  svg.addEventListener("keydown", (event) => {
    const now = view.focused ?? 0, last = view.sessions.length - 1;
    const vertical = (step) => {
      const [r, c] = place(now), row = rows[r + step];
      return row ? row[Math.min(row.length - 1, Math.round((c / rows[r].length) * row.length))] : now;
    };
    const to = {
      ArrowRight: Math.min(last, now + 1), ArrowLeft: Math.max(0, now - 1), Home: 0, End: last,
      ArrowDown: vertical(1), ArrowUp: vertical(-1),
    }[event.key];
    if (to !== undefined) {
      event.preventDefault();
      mark(to);
    } else if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      view.open(now);
    }
  });
}

function firstPick(view) {
  const at = view.sessions.findIndex((session) => session.id === view.picks[0]);
  return at >= 0 ? at : 0;
}
