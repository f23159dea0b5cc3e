"""The one exception that carries a message for the user instead of a traceback."""

from __future__ import annotations


class MiaError(ValueError):
    """A wrong input, told in one line: what was given, what is allowed, what to do."""


class TooLong(MiaError):
    """A text has more tokens than the model, or the limit set for it, allows."""
