"""What a generator is shown: instruction, summary or signature, evidence, chunks, question, and how to answer.

The order and the content of the blocks are those of MiA-RAG (arXiv 2512.17220, figures 17 to 22), the words are ours.
Training builds its examples with the same function, so a generator is served what it was trained on.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from string import ascii_uppercase
from typing import Any, Literal, get_args

from mia_serve.core.errors import MiaError
from mia_serve.llm.neutral import backslash, keep_open

Task = Literal["free", "choice", "letter", "claim"]
TASKS: tuple[Task, ...] = get_args(Task)

SUMMARY_HEADER = "## Book Summary:"
SIGNATURE_HEADER = "## Global signature (session summaries):"
EVIDENCE_HEADER = "## Facts found so far:"

_RULES: dict[Task, str] = {
    "free": "Answer with one phrase, as short as it can be and still be right. Do not explain.",
    "choice": (
        "The story is fiction, and so is every crime in it. Choose the one option that is right. Reply with JSON and "
        'nothing else, in the form {"answer": "x", "reasoning": "xxx"}, where x is the letter of that option.'
    ),
    "letter": "Choose the one option that is right. Reply with its letter, one of {letters}, and nothing else.",
    "claim": (
        "Answer TRUE only if the whole statement is true, and FALSE if any part of it is not. Reply in the form "
        "<explanation>why, in at most one paragraph</explanation><answer>TRUE or FALSE</answer>."
    ),
}
_GUIDED: dict[Task, str] = {
    # No placeholder: small models copy it.
    "free": (
        "Answer with one phrase, as short as it can be and still be right. Reply with a JSON object whose field "
        '"answer" holds the phrase.'
    ),
    "choice": _RULES["choice"],
    "letter": 'Choose the one option that is right. Reply with JSON: {"answer": "x"}, where x is one of {letters}.',
    "claim": (
        "Answer TRUE only if the whole statement is true, and FALSE if any part of it is not. Reply with JSON: "
        '{"explanation": "why, in at most one paragraph", "answer": "TRUE or FALSE"}.'
    ),
}
_CITE: dict[Task, str] = {
    "free": "After the phrase, name the passages that show it, such as [P2].",
    "choice": "In the reasoning, name the passages that show it, such as [P2].",
    "letter": "After the letter, name the passages that show it, such as [P2].",
    "claim": "In the explanation, name the passages that show it, such as [P2].",
}

# What a prompt is laid out with. Such signs inside a text, as a page that was made to mislead may have them, would pass
# for the prompt's own.
_MARKS_AND_HEADERS = re.compile(
    r"""
    (?=\[\s{0,3}[PSHE]\s{0,3}[0-9]{1,4}\s{0,3}\])
    | (?:^|[\r\v\f\x1c-\x1e\x85\u2028\u2029])[ \t\xa0\u3000]{0,20}(?=\#{1,6}\s{0,3}(?:
        book\ summary | global\ signature | facts\ found | relevant\ contexts | question | options
        | original\ question | statement | query | step | signature | summaries | evidence | passages)\b)
    """,
    re.IGNORECASE | re.MULTILINE | re.VERBOSE,
)
_TAGS = ("context", "statement", "question", "explanation", "answer")


def as_text(text: str) -> str:
    r"""Return a text to be shown in a prompt, a backslash in what looks like the prompt's own marks, headers and tags.

    They become ``\[P2]``, ``\## Question:`` and ``<\/context>``.
    """
    return keep_open(backslash(text, _MARKS_AND_HEADERS), _TAGS)


def build_prompt(
    task: Task,
    question: str,
    chunks: Sequence[str],
    summary: str | None = None,
    signature: Sequence[str] | None = None,
    options: Sequence[str] | None = None,
    evidence: Sequence[str] | None = None,
    numbered: bool = False,
    guided: bool = False,
) -> list[dict[str, str]]:
    """Lay out the prompt of one question as chat messages.

    A block without content is left out. In all texts, what looks like a mark, a header or a tag of the prompt itself
    ([P2], "## Question:", </context>) gets a backslash, see `as_text`. A generator that was trained with summaries of
    whole books (MiA-Gen) should get a signature as such a ``summary``, its texts in lines; others are told what it is
    and see it numbered.

    Args:
        task: How to answer. ``free``: a short phrase (NarrativeQA). ``choice``: JSON with the letter of an option
            (DetectiveQA). ``letter``: the letter alone (InfiniteBench). ``claim``: an explanation and TRUE or FALSE
            (NoCha).
        question: The question; for ``claim`` the statement.
        chunks: Evidence, best first.
        summary: Summary of the whole book.
        signature: Summaries of the sessions in σ.
        options: For ``choice`` and ``letter``: the texts of the options, which are lettered from A.
        evidence: Facts that an agent has gathered, shown as [E1], [E2], … between signature and chunks.
        numbered: Show the chunks as [P1], [P2], … and ask to cite them. No generator is trained with this.
        guided: Ask for the JSON of `answer_schema`. No generator is trained with this.

    Returns:
        A system message (the instruction) and a user message.

    Raises:
        MiaError: Unknown task, no question, summary and signature at once, or options that do not fit the task.
    """
    _check(task, question, summary, signature, options, evidence)
    question, chunks = as_text(question), [as_text(text) for text in chunks]
    context = [SUMMARY_HEADER, as_text(summary)] if summary else []
    if signature:
        context = [SIGNATURE_HEADER, *(f"[S{i}] {as_text(text)}" for i, text in enumerate(signature, start=1))]
    blocks = ["\n".join(context)] if context else []
    if evidence:
        blocks.append(
            "\n".join([EVIDENCE_HEADER, *(f"[E{i}] {as_text(fact)}" for i, fact in enumerate(evidence, start=1))])
        )
    rule = (_GUIDED if guided else _RULES)[task]
    if numbered and chunks:
        chunks = [f"[P{i}] {text}" for i, text in enumerate(chunks, start=1)]
        rule = f"{rule} {_CITE[task]}"
    if task == "claim":
        if chunks:
            blocks.append("<context>\n" + "\n\n".join(chunks) + "\n</context>")
        blocks.append(f"<statement>{question}</statement>")
        blocks.append("<question>Going by the context, is the statement TRUE or FALSE?</question>")
    else:
        if chunks:
            blocks.append("## Relevant Contexts:\n" + "\n\n".join(chunks))
        blocks.append(f"## Question:\n{question}")
        if options:
            letters = ascii_uppercase[: len(options)]
            rule = rule.replace("{letters}", ", ".join(letters))
            blocks.append(
                "## Options:\n" + "\n".join(f"{x}. {as_text(text)}" for x, text in zip(letters, options, strict=True))
            )
    blocks.append(rule)
    return [
        {"role": "system", "content": _instruction(summary, signature, evidence, chunks)},
        {"role": "user", "content": "\n\n".join(blocks)},
    ]


def answer_schema(task: Task, n_options: int = 0) -> dict[str, Any]:
    """Return the JSON schema of a guided reply, every string bounded: for models that keep to no form by themselves."""
    letters = list(ascii_uppercase[:n_options])
    answer = {"free": {"type": "string", "maxLength": 200}, "claim": {"enum": ["TRUE", "FALSE"]}}
    fields: dict[str, Any] = {"answer": answer.get(task, {"enum": letters})}
    if task == "choice":
        fields["reasoning"] = {"type": "string", "maxLength": 400}
    if task == "claim":
        fields = {"explanation": {"type": "string", "maxLength": 400}, **fields}  # the reasons come before the verdict
    return {"type": "object", "properties": fields, "required": list(fields), "additionalProperties": False}


def _instruction(
    summary: str | None, signature: Sequence[str] | None, evidence: Sequence[str] | None, chunks: Sequence[str]
) -> str:
    sources = ["the summary of the book"] if summary else []
    sources += ["the summaries of the sessions that matter here"] if signature else []
    sources += ["the facts found so far"] if evidence else []
    sources += ["the relevant passages"] if chunks else []
    listed = ", ".join(sources[:-1]) + " and " + sources[-1] if len(sources) > 1 else "".join(sources)
    given = f" Go by {listed} below." if sources else ""
    return f"You are a helpful assistant who answers questions about a book accurately.{given}"


def _check(
    task: str,
    question: str,
    summary: str | None,
    signature: Sequence[str] | None,
    options: Sequence[str] | None,
    evidence: Sequence[str] | None,
) -> None:
    if task not in TASKS:
        raise MiaError(f"task={task!r}: allowed are {', '.join(map(repr, TASKS))}")
    if not question.strip():
        raise MiaError("question is empty: give the question, or for a claim the statement")
    if summary and signature:
        raise MiaError("summary and signature are both given: both tell of the whole book, so give one of them")
    if isinstance(signature, str):
        raise MiaError("signature is one string: give a list of summaries, or the string as summary")
    if isinstance(evidence, str):
        raise MiaError("evidence is one string: give a list of facts")
    wanted = task in ("choice", "letter")
    if wanted and not (options and 2 <= len(options) <= len(ascii_uppercase)):
        raise MiaError(f"task={task!r} needs options: give 2 to {len(ascii_uppercase)} texts")
    if options and not wanted:
        raise MiaError(f"task={task!r} has no options: leave them out, or take 'choice' or 'letter'")
