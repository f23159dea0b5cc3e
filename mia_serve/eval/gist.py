"""Baseline: read with gists (ReadAgent, arXiv 2402.09727): choose pages by their gists, then answer from both.

The gist memory is the summaries of all sessions of the haystack, numbered. The model says which sessions it wants to
read in full, at most so many and all at once, and answers from all gists and the chunks of these sessions. Nothing is
retrieved by vectors. The wording is ours.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, cast

from pydantic import BaseModel, BeforeValidator, model_validator

from mia_serve.core.errors import MiaError
from mia_serve.llm import LlmFailed, Message, Metered, Usage, ask_json
from mia_serve.rag import static
from mia_serve.rag.fitting import Contents, Trimmed, estimate_tokens, prompt_tokens
from mia_serve.rag.question import Question
from mia_serve.signature import Signature

if TYPE_CHECKING:
    from mia_serve.llm import ChatClient
    from mia_serve.mindscape import Mindscape, Session

NO_PAGES = "no pages chosen"
"""Begins ``detail`` where the reply that names the pages failed."""
PAGES = 5
"""Sessions that may be read in full (ReadAgent: one to six)."""

_LOOK_UP_TOKENS = 128  # of the reply that names the pages
_LEAST = 8  # tokens of a gist that still says something
_SHARE = 0.5  # of the context that the gists may fill; the other half is for pages and question
_TRIES, _SHORTER = 4, 0.75  # prompts that the endpoint may find too long


def _numbers(value: Any) -> Any:
    """Take "3" and "[3]" for 3, and one number for a list of one."""
    listed = value if isinstance(value, list) else [value]
    return [one.strip(" []#") if isinstance(one, str) else one for one in listed]


class _Pages(BaseModel):
    pages: Annotated[list[int], BeforeValidator(_numbers)]

    @model_validator(mode="before")
    @classmethod
    def _bare(cls, value: Any) -> Any:
        """Take the list alone for the object that holds it."""
        return {"pages": value} if isinstance(value, list) else value


class _Choice(NamedTuple):
    """What the model chose to read: gists as it saw them, places of the sessions, what went wrong, tokens spent."""

    gists: tuple[str, ...]
    pages: tuple[int, ...]
    problem: str
    usage: Usage


async def answer(
    client: ChatClient,
    mindscape: Mindscape,
    question: Question,
    *,
    pages: int = PAGES,
    max_tokens: int = static.MAX_TOKENS,
    context_tokens: int | None = None,
    guided: bool = False,
) -> static.Answer:
    """Answer a question from the gists of all sessions and the full text of those that the model asked for.

    What is too long for the model's context is shortened alike, no session before another: the gists to half the
    context, each to the same most tokens; the pages to what is left, each to the same share, whole chunks from its
    beginning.

    Args:
        client: The model.
        mindscape: Sessions and chunks.
        question: The question.
        pages: Most sessions to be read in full.
        max_tokens: Most tokens of the reply.
        guided: See `static.answer`.
        context_tokens: Tokens that prompt and reply may take together; what the endpoint says where None.

    Returns:
        The answer. Its passages are the chunks of the sessions that were read, in the order in which they were asked
        for and in reading order within: no ranking, so recall among the first ten is what the first page gives.
        ``signature`` is the gist memory. Where the model names no page that there is, it answers from the gists alone;
        where its reply is none at all, ``detail`` says so too.

    Raises:
        MiaError: ``pages`` is below 1.
        LlmFailed: Any other call would fail too (``hopeless``).
    """
    if pages < 1:
        raise MiaError(f"pages={pages}: give at least 1 session to read")
    context = context_tokens if context_tokens is not None else await client.context_tokens()
    sessions = mindscape.sessions
    choice = await _choose(client, question, [_gist(session) for session in sessions], pages, context, max_tokens)
    if choice is None:
        detail = f"the gists of {len(sessions)} sessions do not fit a context of {context} tokens, however they are cut"
        return static.Answer(None, "", (), None, "chunks+sig", (), Trimmed(), Usage(), "too long", detail=detail)
    memory = Signature(tuple(session.id for session in sessions), choice.gists)
    read = [sessions[place] for place in choice.pages]
    passages = _passages(mindscape, read, _room(question, choice.gists, context, max_tokens))
    answered = await static.answer(
        client,
        question,
        passages,
        signature=memory,
        mode="chunks+sig",
        max_tokens=max_tokens,
        context_tokens=context,
        guided=guided,
    )
    detail = "; ".join(filter(None, (choice.problem, answered.detail)))
    return replace(answered, usage=_added(choice.usage, answered.usage), detail=detail)


async def _choose(
    client: ChatClient, question: Question, gists: list[str], pages: int, context: int | None, max_tokens: int
) -> _Choice | None:
    """Have the model choose pages by the gists; None where these do not fit, however short they are cut."""
    counted, room = Metered(client), context
    for attempt in range(_TRIES):
        shown = gists if room is None else fair_gists(gists, int(_SHARE * (room - max_tokens)))
        if shown is None:
            return None
        try:
            messages = gist_prompt(question, shown, pages)
            found: _Pages = await ask_json(cast("ChatClient", counted), messages, _Pages, _LOOK_UP_TOKENS)
        except LlmFailed as failure:
            if failure.hopeless:
                raise
            if failure.reason == "too long" and attempt < _TRIES - 1:
                room = int(_SHORTER * (room or prompt_tokens(messages) / _SHARE))
                continue
            return _Choice(tuple(shown), (), f"{NO_PAGES}: {failure.label}", counted.usage)
        wanted = [number - 1 for number in dict.fromkeys(found.pages) if 1 <= number <= len(gists)]
        return _Choice(tuple(shown), tuple(wanted[:pages]), "", counted.usage)
    raise AssertionError("the last try returns")


def fair_gists(gists: Sequence[str], budget: int, tokens: Callable[[str], int] = estimate_tokens) -> list[str] | None:
    """Shorten texts to a budget of tokens: none is cut before a longer one, and all that are cut keep as much.

    Args:
        gists: The texts.
        budget: Most tokens of all together.
        tokens: Counts a text's tokens.

    Returns:
        The texts, cut at words where they are cut; None where they could keep next to nothing each.
    """
    sizes = [tokens(gist) for gist in gists]
    if sum(sizes) <= budget:
        return list(gists)
    cap = _fair_cap(sizes, budget)
    if cap < _LEAST:
        return None
    return [gist if size <= cap else _cut(gist, cap, tokens) for gist, size in zip(gists, sizes, strict=True)]


def _fair_cap(sizes: Sequence[int], budget: int) -> int:
    """Return the largest cap for which the sizes, each no more than it, sum up to no more than the budget."""
    left, cap = budget, 0
    for place, size in enumerate(sorted(sizes)):
        cap = max(0, left) // (len(sizes) - place)
        if size > cap:
            return cap
        left -= size
    return max(sizes, default=0)


def _cut(text: str, most: int, tokens: Callable[[str], int]) -> str:
    low, high = 1, len(text)
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if tokens(text[:middle]) <= most else (low, middle - 1)
    kept = text[:low]
    if low < len(text) and not text[low].isspace() and (space := kept.rfind(" ", low // 2)) > 0:
        kept = kept[:space]  # text without spaces is cut between characters
    return kept.rstrip() or text[:low]


def _gist(session: Session) -> str:
    """Return a session's summary on one line, behind its date where it has one."""
    date = f"({session.date}) " if session.date else ""
    return date + " ".join(session.summary.split())


def gist_prompt(question: Question, gists: Sequence[str], pages: int) -> list[Message]:
    """Return the chat messages that ask which sessions to read in full."""
    listed = "\n".join(f"[{number}] {gist}" for number, gist in enumerate(gists, 1))
    options = "".join(f"\n{chr(65 + i)}. {text}" for i, text in enumerate(question.options))
    what = "statement to be checked" if question.task == "claim" else "question"
    ask = (
        f"## Notes on the sessions of a text, in order:\n{listed}\n\n## The {what}:\n{question.text}{options}\n\n"
        f"Do not answer yet. Choose the sessions whose full text you need to read for it: at most {pages}, the most "
        "useful first, and none that the notes make unnecessary. Reply with JSON and nothing else, in the form "
        '{"pages": [numbers of the sessions]}.'
    )
    role = "You remember a long text by notes, and look up what they leave out."
    return [{"role": "system", "content": role}, {"role": "user", "content": ask}]


def _room(question: Question, gists: Sequence[str], context: int | None, max_tokens: int) -> int | None:
    """Return the tokens that are left for pages beside question, rule, gists and reply."""
    if context is None:
        return None
    rest = Contents(signature=tuple(gists)).prompt(question)
    return max(0, context - max_tokens - prompt_tokens(rest))


def _passages(mindscape: Mindscape, sessions: Sequence[Session], room: int | None) -> list[static.Passage]:
    """Return the chunks of sessions; what does not fit is left out at the end of each, down to its first chunk."""
    text_of = {chunk.id: chunk.text for chunk in mindscape.chunks}
    sizes = [sum(estimate_tokens(text_of[i]) for i in session.chunk_ids) for session in sessions]
    cap = None if room is None or sum(sizes) <= room else _fair_cap(sizes, room)
    found = []
    for session in sessions:
        left = cap
        for place, chunk in enumerate(session.chunk_ids):
            if left is not None:
                left -= estimate_tokens(text_of[chunk])
                if left < 0 and place:
                    break
            found.append(static.Passage(chunk, text_of[chunk], 0.0, session.id))
    return found


def _added(first: Usage, second: Usage) -> Usage:
    return Usage(first.prompt_tokens + second.prompt_tokens, first.completion_tokens + second.completion_tokens)
