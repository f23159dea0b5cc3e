"""The options of every command that asks a language model, and the client that they describe."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple, Optional

import typer

if TYPE_CHECKING:
    from mia_serve.llm import ChatClient, Stats

#: Calls under way at a time, by default.
CONCURRENCY = 64


class Price(NamedTuple):
    """US dollars per million tokens of prompts and of replies."""

    prompt: float
    reply: float


def _price(text: str) -> Price:
    try:
        prompt, reply = (float(part) for part in text.split(","))
    except ValueError:
        raise typer.BadParameter(f"{text!r}: give two numbers such as 0.15,0.6") from None
    if not (0 <= prompt < float("inf") and 0 <= reply < float("inf")):
        raise typer.BadParameter(f"{text!r}: prices are 0 or more")
    return Price(prompt, reply)


LlmOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--llm", metavar="URL", help="OpenAI-compatible endpoint, such as http://localhost:8000/v1."),
]
LlmModelOption = Annotated[
    Optional[str],  # noqa: UP045
    typer.Option("--llm-model", metavar="NAME", help="Name of the model there; by default the only one served."),
]
LlmCacheOption = Annotated[
    Optional[Path],  # noqa: UP045
    typer.Option("--llm-cache", metavar="FILE", help="Keep every reply in this file, and use those in it."),
]
ReplayOption = Annotated[bool, typer.Option("--replay", help="Take all replies from --llm-cache; make no call.")]
ConcurrencyOption = Annotated[int, typer.Option("--concurrency", min=1, help="Calls under way at a time.")]
BudgetOption = Annotated[
    Optional[int],  # noqa: UP045
    typer.Option(
        "--llm-budget", min=1, metavar="TOKENS", help="Stop when prompts and replies of this run have used so many."
    ),
]
PriceOption = Annotated[
    Optional[Price],  # noqa: UP045
    typer.Option(
        "--llm-price", parser=_price, metavar="IN,OUT", help="US dollars per million tokens, to show what it cost."
    ),
]
GuidedOption = Annotated[
    bool, typer.Option("--guided", help="Have the endpoint keep answers to JSON: for models that keep to no form.")
]
MaxTokens = Annotated[
    int,
    typer.Option(
        "--llm-max-tokens",
        min=8,
        help="Tokens of a reply; one that is cut off is asked for once more with 4 times as many.",
    ),
]


def open_client(
    llm: str | None,
    model: str | None,
    cache_file: Path | None,
    replay: bool,
    concurrency: int = CONCURRENCY,
    budget: int | None = None,
) -> ChatClient:
    """Return the client that the options describe; call it before anything heavy is loaded.

    Without a model's name the endpoint is asked for its only one; in replay, the recording.

    Args:
        llm: ``--llm``.
        model: ``--llm-model``.
        cache_file: ``--llm-cache``.
        replay: ``--replay``.
        concurrency: ``--concurrency``.
        budget: ``--llm-budget``, tokens.

    Raises:
        MiaError: The options do not go together, or leave the model open.
        FileNotFoundError: There is nothing to replay.
        LlmFailed: The endpoint does not say what it serves.
    """
    from mia_serve.core.errors import MiaError
    from mia_serve.llm import Budget, ChatClient, ReplyCache

    if replay and cache_file is None:
        raise MiaError("--replay needs --llm-cache FILE, the replies of an earlier run")
    if not llm and not replay:
        raise MiaError(
            "give --llm URL, an OpenAI-compatible endpoint such as http://localhost:8000/v1 (`mia-serve llm up MODEL` "
            "starts one)"
        )
    cache = ReplyCache(cache_file, "replay" if replay else "record") if cache_file is not None else None
    if not model:
        names = cache.models if replay and cache is not None else _served(llm or "")
        if len(names) != 1:
            where = str(cache_file) if replay else llm
            found = f"{where} has {len(names)} models ({', '.join(names)})" if names else f"{where} has no model"
            raise MiaError(f"{found}; say which with --llm-model NAME")
        (model,) = names
    return ChatClient(llm, model, cache=cache, concurrency=concurrency, budget=Budget(max_tokens=budget))


def _served(url: str) -> list[str]:
    import asyncio

    from mia_serve.llm import served_models

    return [model.id for model in asyncio.run(served_models(url))]


def cost_text(stats: Stats, price: Price | None = None) -> str:
    """Return one line, newline at its end, on what was asked of the model and, with a price, what it cost."""
    line = f"LLM: {stats.to_text()}"
    if price is not None:
        dollars = (stats.prompt_tokens * price.prompt + stats.completion_tokens * price.reply) / 1e6
        line += f", ${dollars:.4f}" if dollars < 1 else f", ${dollars:.2f}"
    return line + "\n"
