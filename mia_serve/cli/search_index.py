"""``mia-serve search --index``: one question against an index that needs no mindscape."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Sequence
from enum import StrEnum
from pathlib import Path
from typing import Any

import typer

from mia_serve.cli.common import emit, load_encoder

#: Options of `search` that mean nothing without an index.
INDEX_OPTIONS = ("sessions", "pooling", "where")


class Pooled(StrEnum):
    """How the scores of a session's chunks become its own."""

    max = "max"
    topk = "topk"
    mean = "mean"
    early = "early"
    lme = "lme"


def refuse_options(context: typer.Context, names: Collection[str], other: str) -> None:
    """Refuse options that were given though they mean nothing beside another.

    Raises:
        ValueError: Naming the first of them.
    """
    for parameter in context.command.params:
        source = context.get_parameter_source(parameter.name or "")
        if parameter.name in names and source is not None and source.name == "COMMANDLINE":
            raise ValueError(f"{parameter.opts[0]} has no meaning with {other}; leave one of them out")


def search_index(
    folder: Path,
    encoder: str | None,
    query: str,
    k: int,
    sessions: bool,
    pooling: Pooled,
    where: Sequence[str],
    backend: str,
    device: str,
    json_to: str | None,
) -> None:
    """Print the best chunks or sessions of an index.

    Raises:
        FileNotFoundError: There is no index.
        ValueError: Options that do not go together, or an encoder that is not the index's.
    """
    if encoder is None:
        raise ValueError("--index needs --encoder, the one that made its vectors; `index info` prints its hash")
    if pooling is not Pooled.max and not sessions:
        raise ValueError(f"--pooling {pooling.value} is for sessions; add --sessions or leave it out")
    filters = parse_where(where)
    from mia_serve.index import SessionIndex
    from mia_serve.index.store import read_generation

    read_generation(folder)  # says what is wrong with the folder before the encoder is opened
    model = load_encoder(encoder, device)
    vectors = model.encode_queries([query])
    index = SessionIndex.load(folder, model.spec_hash, backend=backend, device=device, verify=False)
    hits: list[dict[str, Any]]
    if sessions:
        found = index.search_sessions(vectors, k, pooling=pooling.value, where=filters)
        columns = (found.ids[0], found.scores[0].tolist(), found.best_chunk[0], found.best_score[0].tolist())
        hits = [
            {"rank": rank, "session_id": name, "score": score, "best_chunk": chunk, "best_score": best}
            for rank, (name, score, chunk, best) in enumerate(zip(*columns, strict=False), 1)
        ]
        lines = [
            f"{hit['rank']:>3}  {hit['score']:.4f}  {hit['session_id']}  {hit['best_chunk']} {hit['best_score']:.4f}"
            for hit in hits
        ]
    else:
        chunks = index.search(vectors, k, where=filters)
        hits = [
            {
                "rank": rank,
                "id": name,
                "score": score,
                "session_id": index.session_of(name),
                "metadata": index.metadata_of(name),
            }
            for rank, (name, score) in enumerate(zip(chunks.ids[0], chunks.scores[0].tolist(), strict=False), 1)
        ]
        lines = [f"{hit['rank']:>3}  {hit['score']:.4f}  {hit['id']}  {hit['session_id']}" for hit in hits]
    record = {
        "query": query,
        "index": str(folder),
        "encoder": {"name": encoder, "spec_hash": model.spec_hash},
        "pooling": pooling.value if sessions else None,
        "where": filters,
        "hits": hits,
    }
    emit("\n".join(lines or ["no hits"]) + "\n", record, json_to)


def parse_where(given: Sequence[str]) -> dict[str, list[Any]] | None:
    """Read ``key=value`` filters: all keys must hold, one of the values of each.

    ``year=2023`` finds the text "2023" as well as the number, which a command line cannot tell apart.

    Raises:
        ValueError: An item has no key or no ``=``.
    """
    filters: dict[str, list[Any]] = {}
    for item in given:
        key, equals, value = item.partition("=")
        if not key or not equals:
            raise ValueError(f"--where {item!r}: give KEY=VALUE, such as speaker=Ann")
        filters.setdefault(key, []).append(value)
        try:
            read = json.loads(value)
        except (ValueError, RecursionError):
            continue
        if isinstance(read, int) or (isinstance(read, float) and math.isfinite(read)):  # true and false too
            filters[key].append(read)
    return filters or None
