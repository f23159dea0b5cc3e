"""Texts made harmless for prompts: what would pass for a control token, or for a mark of the prompt itself.

A chat template turns messages into one string, and most tokenizers read ``<|im_end|>`` in it as the control token
whoever wrote it. So a page of a book could end its own message and speak as the system. A backslash after the first
sign keeps such a string readable, and no tokenizer takes it for a token any more.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence
from functools import cache

# Characters that are not seen; some tokenizers and servers drop them, which would join what they keep apart.
_UNSEEN = (
    *(range(0x09), range(0x0E, 0x1C), range(0x7F, 0x80), range(0xAD, 0xAE), range(0x34F, 0x350), range(0x61C, 0x61D)),
    *(range(0x115F, 0x1161), range(0x17B4, 0x17B6), range(0x180B, 0x1810), range(0x200B, 0x2010)),
    *(range(0x202A, 0x202F), range(0x2060, 0x2070), range(0x3164, 0x3165), range(0xFE00, 0xFE10)),
    *(range(0xFEFF, 0xFF00), range(0xFFA0, 0xFFA1), range(0x1D173, 0x1D17B), range(0xE0000, 0xE1000)),
)
# Where Unicode has other shapes of ASCII: raised, lettered, circled, small, full-width, mathematical, squared.
_SHAPES = (
    *(range(0x2070, 0x20A0), range(0x2100, 0x2150), range(0x2460, 0x2500), range(0xFE50, 0xFE70)),
    *(range(0xFF01, 0xFF5F), range(0x1D400, 0x1D800), range(0x1F130, 0x1F150)),
)

#: The known control tokens, after their first sign.
_TOKEN = re.compile(
    r"""
    [<\[\]](?=                                        # the first sign; the ] is for MiniMax
      (?<=<)\|                                         # <|im_start|>, <|eot_id|>, <|channel>, DeepSeek's <｜User｜>
    | (?<=<)[\w▁/ -]{1,40}\|>                          # Gemma 4: <turn|>
    | (?<=<)</?sys>>                                   # Llama 2
    | (?<=<)/?(?:
        s | bos | eos | pad | unk | mask | cls | sep | sop | eop | eod | eoh | eoa | eom | eot
      | (?:bos|eos|pad|unk|end)_token
      | (?:start|end|begin)_of_[a-z_]{1,30} | (?:start|end|begin)of[a-z]{1,20} | [a-z_]{1,20}_(?:start|end|begin)
      | think(?:ing)? | thought | reasoning | scratch_pad | tools? | tool_(?:calls?|responses?|results?|list)
      | function_?calls? | function_?(?:responses?|results?)
      | (?:start|end)_(?:function|tool)_[a-z_]{1,20}
      | fim_[a-z]{1,12} | repo_?name | file_?sep | filename | gh_stars | empty_output | commit_[a-z]{1,12}
      | issue_[a-z]{1,12} | jupyter_[a-z]{1,12} | image(?:_soft_token|_pad|_placeholder)? | audio_soft_token
      | unused_?\d{1,5} | extra_id_\d{1,5} | special_\d{1,5} | reserved_?(?:special_token_?)?\d{1,6}
      | longcat_[a-z_]{1,20} | (?:seed|minimax):[a-z_]{1,20} | _(?:user|system|bot|assistant)
    )>
    | (?<=\[)/?(?:
        inst | system_prompt | available_tools | tool_calls | tool_results | tool_content | args | call_id | think
      | img(?:_break|_end)? | (?:begin_)?audio | transcribe | prefix | middle | suffix | model_settings
      | cls | sep | pad | unk | mask | [gs]mask | bos | eos | control_\d{1,4}
    )\]
    | (?<=\[)\|[\w ]{1,30}\|\]                         # EXAONE: [|user|]
    | (?<=\])~!?b[\[\]] | (?<=\[)e~\[                   # MiniMax
    )
    """,
    re.VERBOSE | re.IGNORECASE,
)


def neutral(text: str) -> str:
    r"""Return a text in which no string is a control token of a language model.

    Such a string gets a backslash after its first sign: ``<\|im_start|>``, ``<\/s>``, ``[\INST]``. It is one
    whatever its case and width, and with characters between that are not seen. All that begins with ``<|`` counts, and
    the known tokens of other forms. Any other text is returned as it is, as is one that was made neutral before.
    """
    return backslash(text, _TOKEN)


def keep_open(text: str, tags: Sequence[str]) -> str:
    r"""Return a text in which no tag of these names begins or ends: ``</text>`` becomes ``<\/text>``.

    Spaces inside the tag, attributes, case, width, and characters that are not seen make no difference.

    Args:
        text: What is to be shown between such tags.
        tags: Their names, of letters.
    """
    return backslash(text, _tag_pattern(tuple(tags)))


def backslash(text: str, pattern: re.Pattern[str]) -> str:
    """Put a backslash at the end of each match of a pattern.

    The pattern is matched against the text with its characters in their plain ASCII shape, where they have one, and
    without those that are not seen.
    """
    plain = text.translate(_plain())
    places = [found.end() for found in pattern.finditer(plain)]
    if not places:
        return text
    if len(plain) != len(text):
        seen = [place for place, sign in enumerate(text) if _plain().get(ord(sign), sign) is not None]
        places = [seen[place] for place in places]
    return "\\".join(text[start:end] for start, end in zip([0, *places], [*places, len(text)], strict=True))


@cache
def _tag_pattern(tags: tuple[str, ...]) -> re.Pattern[str]:
    names = "|".join(tags)
    return re.compile(rf"<(?=\s{{0,9}}(?:/\s{{0,9}})?(?:{names})(?![\w-]))", re.IGNORECASE)


@cache
def _plain() -> dict[int, str | None]:
    """Return the table of `str.translate` to plain ASCII; what is not seen goes."""
    shapes = {code: unicodedata.normalize("NFKC", chr(code)) for codes in _SHAPES for code in codes}
    table: dict[int, str | None] = {code: to for code, to in shapes.items() if len(to) == 1 and to.isascii()}
    return table | {code: None for codes in _UNSEEN for code in codes}
