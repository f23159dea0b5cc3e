// What a search found: σ with its gains, and the hits before and after it.

import { clip, el, number, readable } from "./dom.js";
import { t } from "./strings.js";

export const TERMS = [["query", "termQuery"], ["cover", "termCover"], ["spread", "termSpread"]];

/** Return the picks of a reply: [{id, summary, gain, terms}], terms weighted so that they sum to the gain. */
export function picksOf(signature, explanation, summaryOf) {
  if (!signature) return [];
  const { session_ids: ids, summaries, gains, terms } = signature;
  const { weights } = explanation;
  // Given summaries may be no session's, and those of sessions come in the order in which the encoder reads them.
  return (ids.length ? ids : summaries).map((_, i) => ({
    id: ids[i] ?? null,
    summary: ids.length ? summaryOf(ids[i]) : summaries[i],
    gain: gains[i] ?? null,
    terms: terms[i]?.map((term, at) => term * weights[at]) ?? null,
  }));
}

/** List σ: each summary, and its gain as a bar of three terms. */
export function drawPicks(box, picks, nameOf, open) {
  const most = Math.max(1e-9, ...picks.map((pick) => pick.gain ?? 0));
  const list = el("ol", { class: "picks" }, picks.map((pick, i) =>
    el("li", {},
      el("span", { class: "n", "aria-hidden": "true" }, String(i + 1)),
      el("div", {},
        pick.id === null ? null : el("button", { type: "button", class: "link", onclick: () => open(pick.id) }, nameOf(pick.id)),
        el("p", {}, pick.summary)),
      drawGain(pick, most))));
  const key = picks.some((pick) => pick.terms)
    ? el("div", { class: "legend" }, TERMS.map(([kind, name]) => el("span", {}, el("i", { class: kind }), t(name))))
    : null;
  box.replaceChildren(...[list, key].filter(Boolean));
}

function drawGain(pick, most) {
  if (pick.gain === null) return null;
  const said = el("small", {}, t("gain", { n: number(pick.gain) }));
  if (!pick.terms) return el("div", { class: "gain" }, said);
  const sum = pick.terms.reduce((a, b) => a + b, 0) || 1;
  const bar = el("div", { class: "stack", "aria-hidden": "true", css: { width: `${(100 * pick.gain) / most}%` } },
    pick.terms.map((value, at) => el("i", { class: TERMS[at][0], css: { width: `${(100 * value) / sum}%` } })));
  const parts = pick.terms.map((value, at) =>
    el("span", {}, el("span", { class: "hidden" }, t(TERMS[at][1]) + " "), el("i", { class: `dot ${TERMS[at][0]}`, title: t(TERMS[at][1]) }), number(value)));
  return el("div", { class: "gain" }, said, bar, el("small", { class: "terms" }, parts));
}

/** Put the hits of the question alone beside those with σ. Only one list where there was no σ. */
export function drawHits(box, before, after, scores, nameOf, open) {
  const old = new Map(before.map((hit, i) => [hit.id, i + 1]));
  const now = new Set(after.map((hit) => hit.id));
  const side = (title, hits, mark) =>
    el("div", { class: "side" }, el("h3", {}, title), el("ol", { class: "hits" },
      hits.map((hit, i) => drawHit(hit, i + 1, mark?.(hit, i + 1), scores, nameOf, open))));
  if (!before.length) box.replaceChildren(side(t("hitsOnly"), after, null));
  else box.replaceChildren(
    side(t("before"), before, (hit) => (now.has(hit.id) ? null : ["gone", t("gone"), ""])),
    side(t("after"), after, (hit, rank) => change(old.get(hit.id), rank)));
  box.classList.toggle("single", !before.length);
}

function change(old, rank) {
  if (old === undefined) return ["new", t("isNew"), t("newRank")];
  if (old === rank) return ["same", t("same"), t("sameRank", { n: rank })];
  const moved = old - rank;
  return moved > 0
    ? ["up", "↑" + t("up", { n: moved }), t("upRank", { old })]
    : ["down", "↓" + t("down", { n: -moved }), t("upRank", { old })];
}

function drawHit(hit, rank, mark, scores, nameOf, open) {
  const text = hit.text ?? "";
  const parts = Object.entries(scores[hit.id] ?? {}).filter(([, value]) => Number.isFinite(value) && value !== 0);
  return el("li", { "data-id": hit.id },
    el("details", {},
      el("summary", {},
        el("span", { class: "rank" }, String(rank)),
        el("span", { class: "lead" }, clip(text.replace(/\s+/g, " "), 150) || t("noText")),
        mark ? el("span", { class: `mark ${mark[0]}`, title: mark[2] || null }, mark[1]) : null),
      el("p", { class: "read" }, readable(text)),
      el("small", {},
        hit.session_id ? el("button", { type: "button", class: "link", onclick: () => open(hit.session_id) }, nameOf(hit.session_id)) : null,
        ` ${hit.id} · ${number(hit.score)} `,
        parts.map(([name, value]) => `· ${name} ${number(value)} `))));
}
