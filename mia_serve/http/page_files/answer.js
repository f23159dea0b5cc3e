// The answer as it is written, and the steps of the agent as they are taken.

import { Refused, stream, words } from "./api.js";
import { byId, clip, el, readable } from "./dom.js";
import { t } from "./strings.js";

const idsOf = (signature) => signature?.session_ids ?? [];

/**
 * Ask for an answer and show it while it comes.
 *
 * `view.nameOf(id)` names a session, `view.light(sessions, hits)` shows a step on the map, `view.open(id)` opens a session.
 */
export async function showAnswer(request, view, signal) {
  const page = new AnswerPage(view);
  try {
    await stream("v1/answer", { ...request, stream: true }, (name, data) => page.take(name, data), signal);
    page.end();
  } finally {
    byId("answer").ariaBusy = "false";
  }
}

class AnswerPage {
  constructor(view) {
    this.view = view;
    this.passages = new Map();
    this.before = null; // the σ of the step before
    this.facts = new Set();
    this.said = el("p", { class: "reply waiting" }, t("thinking"));
    this.steps = el("ol", { class: "steps" });
    this.failed = null;
    byId("answer").replaceChildren(this.said);
    byId("steps").replaceChildren(this.steps);
    byId("evidence").replaceChildren();
    byId("answer").ariaBusy = "true"; // so that it is read out whole, not by each piece
    byId("answer-box").hidden = false;
  }

  take(name, data) {
    if (data === null) return;
    if (name === "token") this.token(data.text ?? "");
    else if (name === "step") this.step(data);
    else if (name === "passages") this.keep(data.passages);
    else if (name === "answer") this.answer(data);
    else if (name === "error") this.failed = data.error ?? data;
  }

  token(text) {
    if (this.said.classList.contains("waiting")) {
      this.said.classList.remove("waiting");
      this.said.textContent = "";
    }
    this.said.append(text);
  }

  keep(passages) {
    for (const passage of passages) this.passages.set(passage.id, passage);
  }

  step(step) {
    const ids = idsOf(step.signature);
    const names = (of) => of.map((id) => this.view.nameOf(id)).join(", ");
    const show = el("button", { type: "button", class: "link", onclick: () => mark() }, t("showStep"));
    const mark = () => {
      for (const other of this.steps.querySelectorAll("li.now")) other.classList.remove("now");
      entry.classList.add("now");
      this.view.light(ids, step.chunks.map((chunk) => chunk.session_id));
    };
    const entry = el("li", {},
      el("p", {}, el("b", {}, t("step", { n: step.step }) + " "), t("stepSearch"), el("q", {}, step.query)),
      el("p", { class: "moved" }, [this.moved(ids, names), t("stepFound", { n: step.chunks.length })].filter(Boolean).join(" · "), " · ", show),
      this.newFacts(step.evidence),
      this.decision(step));
    this.before = ids;
    this.steps.append(entry);
    mark();
  }

  moved(ids, names) {
    if (this.before === null) return ids.length ? t("sigmaStart", { names: names(ids) }) : "";
    const came = ids.filter((id) => !this.before.includes(id)), went = this.before.filter((id) => !ids.includes(id));
    if (!came.length && !went.length) return t("sigmaStayed");
    return [came.length ? t("sigmaGained", { names: names(came) }) : "", went.length ? t("sigmaLost", { names: names(went) }) : ""]
      .filter(Boolean).join("; ");
  }

  decision(step) {
    if (step.failed) return el("p", { class: "failed" }, t("stepFailed", { why: step.failed }));
    const next = step.next_query;
    const refine = step.decision === "REFINE";
    return el("p", {}, t("decided") + ": ", el("b", {}, t(refine ? "refine" : "finish")), refine && next ? [" → ", el("q", {}, next)] : null);
  }

  /** List the facts that were not there a step before. */
  newFacts(facts) {
    const found = facts.filter((fact) => !this.facts.has(fact.text));
    for (const fact of found) this.facts.add(fact.text);
    if (!found.length) return null;
    return el("ul", { class: "facts-list" }, found.map((fact) =>
      el("li", {}, fact.text, fact.sources.length ? el("small", {}, ` [${fact.sources.join(", ")}]`) : null)));
  }

  answer(data) {
    const text = data.answer ?? data.reply;
    this.said.classList.remove("waiting");
    this.said.textContent = text || t("noReply");
    this.keep(data.passages);
    if (data.cited) this.cite(data.citations);
    const plain = (of) => of.replace(/\[[^\]]*\]|[\s.。"“”]+/g, "");
    const { prompt_tokens: read, completion_tokens: wrote, total_tokens: all } = data.usage;
    byId("evidence").replaceChildren(...[
      data.reply && plain(data.reply) !== plain(text) ? el("details", { class: "passages" }, el("summary", {}, t("whole")), el("p", { class: "read" }, data.reply)) : null,
      this.read(data.cited ? data.citations : []),
      el("p", { class: "note" }, t("usage", { model: data.model, all, in: read, out: wrote })),
    ].filter(Boolean));
  }

  cite(ids) {
    if (ids.length) this.said.after(el("p", { class: "cited" }, t("cited"), ids.map((id, i) => [i ? ", " : "", this.citation(id)])));
  }

  citation(id) {
    const session = this.passages.get(id)?.session_id;
    return session ? el("button", { type: "button", class: "link", onclick: () => this.view.open(session) }, id) : id;
  }

  read(citations) {
    if (!this.passages.size) return null;
    const cited = new Set(citations);
    const rows = [...this.passages.values()].map((passage, i) =>
      el("li", {}, el("details", {},
        el("summary", {}, el("span", { class: "rank" }, String(i + 1)),
          el("span", { class: "lead" }, clip(passage.text.replace(/\s+/g, " "), 150)),
          cited.has(passage.id) ? el("span", { class: "mark new" }, "✓") : null),
        el("p", { class: "read" }, readable(passage.text)),
        el("small", {}, this.citation(passage.id)))));
    return el("details", { class: "passages" }, el("summary", {}, `${t("passages")} (${rows.length})`), el("ol", { class: "hits" }, rows));
  }

  /** Tell what failed on the way; a stream that ends without an answer has failed too. */
  end() {
    const waiting = this.said.classList.contains("waiting");
    if (!this.failed && !waiting) return;
    this.said.classList.remove("waiting");
    if (waiting) this.said.textContent = "";
    const { message = "", code = "llm_failed" } = this.failed ?? {};
    const [said, detail] = words(new Refused(502, message, code ?? ""));
    this.said.after(el("p", { class: "error", role: "alert" }, said, detail ? el("small", {}, detail) : null));
  }
}
