"""What the model that updates an agent's state is shown, and the JSON that it is asked for."""

from __future__ import annotations

from string import ascii_uppercase
from typing import TYPE_CHECKING, Any, NamedTuple

from mia_serve.llm import Message
from mia_serve.rag.fitting import prompt_tokens
from mia_serve.rag.prompts import as_text
from mia_serve.rag.state import AgentSettings, AgentState, Fact

if TYPE_CHECKING:
    from mia_serve.mindscape import Mindscape
    from mia_serve.rag.batching import AsyncRetriever

QUERY_WORDS = 60
"""Most words of a query that the model writes."""
TEXT_WORDS = 100
"""Most words of a text of a rewritten signature, as session summaries have."""
LETTERS_PER_WORD = 10
"""Letters for each word allowed, which bounds texts without spaces, and strings in the schema."""

_SOURCES = 6  # most sources that the schema allows a fact
_LEAST = 200  # letters of the last passage that must fit

_ROLE = (
    "You keep the memory of a reader who must answer a question about a long text (a novel, a series, a long chat) and "
    "sees only a few passages of it at a time. At each step a search has just returned passages. You decide whether "
    "the question can be answered now, and bring the memory up to date. Go only by what is shown below; what you may "
    "know of the text from elsewhere does not count."
)
_DECISION = (
    '- "decision": "ANSWER" only if passages and evidence together settle the original question (of a statement: '
    'whether all of it is true), else "REFINE", which searches once more.'
)
_QUERY = (
    '- "next_query": for REFINE, the single thing that is missing most, as one question or phrase that can be '
    "understood on its own: write out names, use no pronouns, and do not repeat a query that found nothing. For "
    "ANSWER, an empty string."
)
_SELECT = (
    '- "signature": ids of at most {k} summaries, the most useful first, out of [S..] and [H..]. Together they must '
    "cover all parts of the text that the question touches: the people, who is really who, what led to what; not only "
    "the part where the last search ended. Keep what still matters, and put in an [H..] where it adds more."
)
_REWRITE = (
    '- "signature": at most {k} short texts of at most {words} words, the most useful first, which together tell what '
    "the question touches in the whole text: the people, who is really who, what led to what; not only the part where "
    "the last search ended. Write them from the summaries [S..] and [H..] and the passages."
)
_EVIDENCE = (
    '- "evidence": the whole list of facts to remember from now on, at most {facts}, each of at most {words} words. '
    "Keep each earlier fact that still matters by naming it as the source of an empty one, such as "
    '{{"fact": "", "source": ["E1"]}}, then add what the passages tell, naming each passage that states it. Never put '
    "in what no passage says."
)
_LANGUAGE = "Write queries and facts in the language of the text. Reply with one JSON object and nothing else:"


class Shown(NamedTuple):
    """What of a state the prompt holds.

    Attributes:
        passage_ids: Chunk ids of [P1], [P2], …
        passages: Their texts.
        signature_rows: Sessions of [S1], [S2], …, rows of ``mindscape.sessions``; empty where σ is free texts.
        signature_texts: Texts of [S1], [S2], …
        candidates: Sessions of [H1], [H2], …, rows of ``mindscape.sessions``.
        evidence: Facts [E1], [E2], …; the latest ones.
    """

    passage_ids: tuple[str, ...]
    passages: tuple[str, ...]
    signature_rows: tuple[int, ...]
    signature_texts: tuple[str, ...]
    candidates: tuple[int, ...]
    evidence: tuple[Fact, ...]


class FittedUpdate(NamedTuple):
    """A prompt: what it holds, its messages, their tokens by estimate, and whether nothing more can be left out."""

    shown: Shown
    messages: list[Message]
    tokens: int
    least: bool


def fit_update(searcher: AsyncRetriever, state: AgentState, settings: AgentSettings, limit: int | None) -> FittedUpdate:
    """Lay out the prompt of a state within a limit of tokens (None: whole).

    Where it does not fit, the worst passages go first (down to one), then candidates from the last, then the oldest
    facts, then the end of the passage. Question, query, σ and rules stay, even where they seem too much: the count is
    an estimate, so the endpoint has the last word.
    """
    mindscape, shown = searcher.mindscape, _shown(searcher, state)

    def over(held: Shown) -> bool:
        return limit is not None and prompt_tokens(_messages(mindscape, state, held, settings)) > limit

    while over(shown) and len(shown.passages) > 1:
        shown = shown._replace(passages=shown.passages[:-1], passage_ids=shown.passage_ids[:-1])
    while over(shown) and shown.candidates:
        shown = shown._replace(candidates=shown.candidates[:-1])
    while over(shown) and shown.evidence:
        shown = shown._replace(evidence=shown.evidence[1:])
    while over(shown) and len(shown.passages[0]) > _LEAST:
        shown = shown._replace(passages=(shown.passages[0][: len(shown.passages[0]) * 3 // 4],))
    messages = _messages(mindscape, state, shown, settings)
    return FittedUpdate(shown, messages, prompt_tokens(messages), over(shown))


def update_schema(shown: Shown, settings: AgentSettings) -> dict[str, Any]:
    """Return the JSON schema of a reply: every string and list bounded, only ids that are shown."""
    labels = _labels("S", len(shown.signature_rows)) + _labels("H", len(shown.candidates))
    sources = _labels("P", len(shown.passages)) + _labels("E", len(shown.evidence))
    fact = {
        "fact": _string(settings.max_fact_words),
        "source": _array({"type": "string", "enum": sources}, _SOURCES) | {"minItems": 1},
    }
    fields: dict[str, Any] = {"decision": {"type": "string", "enum": ["ANSWER", "REFINE"]}}
    if settings.rewrite_query:
        fields["next_query"] = _string(QUERY_WORDS)
    if settings.asks_signature:
        rewrite = settings.signature_update == "rewrite"
        item = _string(TEXT_WORDS) if rewrite else {"type": "string", "enum": labels}
        fields["signature"] = _array(item, settings.k_sum)
    fields["evidence"] = _array(_object(fact), settings.max_facts)
    return _object(fields)


def _shown(searcher: AsyncRetriever, state: AgentState) -> Shown:
    mindscape = searcher.mindscape
    chunks = [mindscape.chunks[row] for row in state.rows]
    rows: tuple[int, ...] = ()
    texts: tuple[str, ...] = ()
    candidates: tuple[int, ...] = ()
    if state.signature is not None:
        rows = tuple(searcher.session_rows[id] for id in state.signature.session_ids)
        # By row, so that [S1] and its text belong together in whatever order the encoder reads the texts.
        texts = tuple(mindscape.sessions[row].summary for row in rows) or state.signature.texts
        candidates = tuple(row for row in state.sessions if row not in rows)
    return Shown(
        passage_ids=tuple(chunk.id for chunk in chunks),
        passages=tuple(chunk.text for chunk in chunks),
        signature_rows=rows,
        signature_texts=texts,
        candidates=candidates,
        evidence=state.evidence,
    )


def _messages(mindscape: Mindscape, state: AgentState, shown: Shown, settings: AgentSettings) -> list[Message]:
    question = state.question
    what = "Statement to be judged TRUE or FALSE" if question.task == "claim" else "Original question"
    blocks = [f"## {what}:\n{as_text(question.text)}"]
    if question.options:
        lettered = zip(ascii_uppercase, question.options, strict=False)
        blocks.append("## Options:\n" + "\n".join(f"{letter}. {as_text(option)}" for letter, option in lettered))
    blocks.append(f"## Query that was searched for now:\n{as_text(state.query)}")
    last = " (the last one: what you keep now is what the answer is written from)"
    blocks.append(f"## Step {state.step + 1} of {settings.n_stop}{last if state.step + 1 == settings.n_stop else ''}")
    summaries = [mindscape.sessions[row].summary for row in shown.candidates]
    if state.signature is not None:
        blocks.append(_block("Signature, summaries of the parts that matter so far", "S", shown.signature_texts))
        if summaries:
            blocks.append(_block("Summaries of other parts in which passages were found", "H", summaries))
    blocks.append(_block("Evidence, facts found earlier", "E", [fact.text for fact in shown.evidence]))
    blocks.append(_block("Passages found now, best first", "P", shown.passages))
    blocks.append("Reply with the JSON object.")
    return [
        {"role": "system", "content": _instruction(settings)},
        {"role": "user", "content": "\n\n".join(blocks)},
    ]


def _instruction(settings: AgentSettings) -> str:
    """Return the rules; they are the same for all questions, so that a server keeps their prefix."""
    rules, form = [_DECISION], ['"decision": "ANSWER" or "REFINE"']
    if settings.rewrite_query:
        rules.append(_QUERY)
        form.append('"next_query": "..."')
    if settings.asks_signature:
        rewrite = settings.signature_update == "rewrite"
        rules.append((_REWRITE if rewrite else _SELECT).format(k=settings.k_sum, words=TEXT_WORDS))
        form.append('"signature": ["...", "..."]' if rewrite else '"signature": ["S1", "H2"]')
    rules.append(_EVIDENCE.format(facts=settings.max_facts, words=settings.max_fact_words))
    form.append('"evidence": [{"fact": "", "source": ["E1"]}, {"fact": "...", "source": ["P3"]}]')
    return "\n".join([_ROLE, *rules, _LANGUAGE, "{" + ", ".join(form) + "}"])


def _block(title: str, letter: str, texts: tuple[str, ...] | list[str]) -> str:
    numbered = [f"[{letter}{i}] {as_text(text)}" for i, text in enumerate(texts, start=1)]
    return f"## {title}:\n" + ("\n".join(numbered) if numbered else "none")


def _labels(letter: str, count: int) -> list[str]:
    return [f"{letter}{i}" for i in range(1, count + 1)]


def _string(words: int) -> dict[str, Any]:
    return {"type": "string", "maxLength": words * LETTERS_PER_WORD}


def _array(items: dict[str, Any], most: int) -> dict[str, Any]:
    return {"type": "array", "items": items, "maxItems": most}


def _object(fields: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}
