"""What a language model is asked when it writes a mindscape: sessions, whole books, single chunks.

The prompt for sessions asks for what the papers' block summaries hold (2602.12192, appendix J.1), those for books and
chunks for what MiA-RAG's mindscape holds (2512.17220); the words are ours.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from mia_serve.llm import Message
from mia_serve.llm.neutral import keep_open
from mia_serve.mindscape.records import Window

_EDITOR = (
    "You are an expert editor of fiction who watches over the continuity of long stories: who is who, what happened, "
    "where, and in which order."
)
_RECORDER = (
    "You are an expert keeper of records of long conversations: who said what, what was agreed, which facts came up, "
    "and when."
)
_FORM = """\
- One connected paragraph in the third person and the past tense; no list, no headings.
- {length}, in the language of the text.
- Say it itself: no words about the text or the task such as "this part describes". Add nothing that is not there.
Reply with the summary and nothing else."""
_LENGTH = "50 to 100 words (80 to 160 characters in Chinese or Japanese)"

_RETELL = """\
Retell what happens there.
- Call the characters by the names they bear and keep how they stand to each other.
- Keep the dialogue that moves the plot, and the places where things happen.
- Pass over what is no part of the story: licences and publishers' notices, page numbers, tables of contents, and a
  broken piece of a sentence at the beginning or the end.
"""
_RECORD = """\
Sum up what was said there.
- Say by name who told, asked or promised what, and keep how the people stand to each other.
- Keep decisions and plans, facts about people, and dates, places and numbers that one may look for later. Where the
  date of the session is known, say which day "yesterday" or "next week" means.
- Pass over greetings, notices of the system, and turns that are cut off.
"""
_MERGE = """\
Those are summaries of consecutive pieces of it, in order. Make one summary of them: the same events and facts, each
once, in order, with all names.
"""
_STRETCH = """\
Those are summaries of consecutive parts of a longer text, in order. Make one summary of this stretch: every turn of the
plot or fact that the rest may depend on, in order, with all names.
"""
_WHOLE = """\
Those are summaries of its consecutive parts, in order. Write the summary of the whole.
- It reads like the complete abstract of one story (or one long conversation), from the beginning to the end.
- Keep what matters most: the main people and how they stand to each other, what sets things going, the turning points
  and their causes, how it ends. Leave out side scenes. Tell each event once, with the names as they are given.
"""
_STRETCH_LENGTH = "150 to 250 words (240 to 400 characters in Chinese or Japanese)"
_WHOLE_LENGTH = "200 to 800 words (300 to 1200 characters in Chinese or Japanese), the longer the more there is to tell"
_CHUNK = """\
Sum up this passage of a longer story.
- Keep what belongs to the plot, so that it reads as one whole: who does what, to whom, where and why.
- Leave out prefaces, notices and other text that is not of the story.
- Fewer than 500 characters, in the language of the text; no explanations and no words about the text.
If there is nothing of a story in it, reply NONE. Otherwise reply with the summary and nothing else."""

#: What a model replies where a chunk holds nothing of the story.
NOTHING = "NONE"

#: Changes with the wording, so that summaries can be told apart that were asked for in other words.
PROMPT_HASH = hashlib.sha256(
    repr(
        (
            *(_EDITOR, _RECORDER, _FORM, _LENGTH, _RETELL, _RECORD, _MERGE),
            *(_STRETCH, _STRETCH_LENGTH, _WHOLE, _WHOLE_LENGTH, _CHUNK),
        )
    ).encode()
).hexdigest()[:16]

_TITLE = 200  # characters of a title that are shown


def window_messages(window: Window, *, chat: bool = False) -> list[Message]:
    """Return the chat that asks for the summary of one window.

    Args:
        window: The window; its texts are shown one after the other.
        chat: Whether it is a session of a conversation.
    """
    return _ask_window(window, window.texts, "", chat)


def piece_messages(window: Window, texts: Sequence[str], *, chat: bool = False) -> list[Message]:
    """Return the chat that sums up some of a window's texts, where all are too long for one prompt."""
    return _ask_window(window, texts, "a piece of ", chat)


def merge_messages(window: Window, summaries: Sequence[str], *, chat: bool = False) -> list[Message]:
    """Return the chat that makes one summary out of those of a window's pieces."""
    place = _place(window, chat)
    return _chat(_role(chat), place, _listed(summaries), _MERGE + _FORM.format(length=_LENGTH))


def stretch_messages(title: str, summaries: Sequence[str]) -> list[Message]:
    """Return the chat that sums up some consecutive parts of a book whose parts do not fit into one prompt."""
    return _chat(_EDITOR, _named(title), _listed(summaries), _STRETCH + _FORM.format(length=_STRETCH_LENGTH))


def book_messages(title: str, summaries: Sequence[str]) -> list[Message]:
    """Return the chat that asks for the summary of a whole book out of those of its parts, in order."""
    return _chat(_EDITOR, _named(title), _listed(summaries), _WHOLE + _FORM.format(length=_WHOLE_LENGTH))


def chunk_messages(title: str, text: str) -> list[Message]:
    """Return the chat that asks for the summary of one chunk, the first stage of MiA-RAG's mindscape."""
    return _chat(_EDITOR, f"a passage of {_named(title)}", _body([text]), _CHUNK)


def _ask_window(window: Window, texts: Sequence[str], piece: str, chat: bool) -> list[Message]:
    rules = (_RECORD if chat else _RETELL) + _FORM.format(length=_LENGTH)
    return _chat(_role(chat), piece + _place(window, chat), _body(texts), rules)


def _role(chat: bool) -> str:
    return _RECORDER if chat else _EDITOR


def _chat(role: str, subject: str, body: str, rules: str) -> list[Message]:
    return [
        {"role": "system", "content": role},
        {"role": "user", "content": f"Here is {subject}.\n\n{body}\n\n{rules}"},
    ]


def _body(texts: Sequence[str]) -> str:
    shown = "\n\n".join(_inside(text.strip("\n")) for text in texts)
    return f"<text>\n{shown}\n</text>"


def _listed(summaries: Sequence[str]) -> str:
    return "\n".join(
        f'<summary part="{i}">\n{_inside(summary)}\n</summary>' for i, summary in enumerate(summaries, start=1)
    )


def _inside(text: str) -> str:
    """Return a text that does not end the tags which it is shown in."""
    return keep_open(text, ("text", "summary"))


def _named(title: str) -> str:
    title = _inside(" ".join(title.split())[:_TITLE])
    return f"“{title}”" if title else "a text without a title"


def _place(window: Window, chat: bool) -> str:
    """Say where a window stands, such as ``Part 3 / 7 of “Title”``."""
    what, of = ("Session", "the conversation ") if chat else ("Part", "")
    dated = f", dated {_inside(' '.join(window.date.split())[:_TITLE])}" if window.date.strip() else ""
    return f"{what} {window.part} / {window.parts} of {of}{_named(window.title)}{dated}"
