"""``mia-serve search`` and ``mia-serve signature``: one question against a mindscape, or against an index alone."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Optional

import typer

from mia_serve.cli.common import (
    K_SUM,
    AlphaOption,
    Backend,
    BackendOption,
    CacheOption,
    Candidates,
    Cover,
    CoverOption,
    CoverWeight,
    CoverWeightOption,
    DeviceOption,
    Encoders,
    JsonOption,
    K0Option,
    KSumOption,
    MindscapeOption,
    Mode,
    PriorOption,
    cache_folder,
    check_folder,
    check_output,
    check_outside,
    check_query,
    chosen,
    emit,
    run_defaults,
)
from mia_serve.cli.embed import check_kept, default_encoder
from mia_serve.cli.search_index import INDEX_OPTIONS, Pooled, refuse_options, search_index

if TYPE_CHECKING:
    from mia_serve.mindscape import Mindscape
    from mia_serve.signature import Signature

#: Options of `search` that mean nothing without a mindscape.
_MINDSCAPE_OPTIONS = (
    *("e1", "selector", "mode", "alpha", "k0", "k_sum"),
    *("prior", "cover", "cover_weight", "candidates", "cache"),
)
#: Characters of a chunk or summary that a terminal line shows.
_SNIPPET = 90


class SearchMode(StrEnum):
    """What E2 is given beside the question."""

    coverage = "coverage"
    first_k = "first_k"
    global_summary = "global_summary"
    none = "none"


QueryOption = Annotated[str, typer.Option(help="The question.")]


def signature(
    mindscape: MindscapeOption,
    query: QueryOption,
    encoder: Annotated[str | None, typer.Option(help="E1, makes the pool; the mindscape's encoder by default.")] = None,
    selector: Annotated[str | None, typer.Option(help="Encoder that chooses; --encoder by default.")] = None,
    mode: Annotated[Mode, typer.Option(help="How the sessions are chosen.")] = Mode.coverage,
    k0: K0Option = 50,
    k_sum: KSumOption = None,
    cover: CoverOption = Cover.member,
    cover_weight: CoverWeightOption = CoverWeight.e1_score,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Choose the sessions that stand for what a question activates."""
    check_output(json_to, "--json")
    check_query(query)
    check_folder(mindscape, "--mindscape")
    check_outside({"--json": json_to}, {"--mindscape": mindscape})
    name = encoder if encoder is not None else default_encoder(mindscape)
    encoders = Encoders(device, cache_folder(cache))
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.vectors import kept_vectors
    from mia_serve.retriever import Retriever

    opened = Mindscape.load(mindscape)
    first = encoders.open(name)
    if encoder is None:
        check_kept(mindscape, name, first)
    chooser = encoders.open(selector) if selector is not None else first
    retriever = Retriever(
        opened,
        first,
        selector=chooser,
        k0=k0,
        k_sum=k_sum or K_SUM,
        cover=cover.value,
        cover_weight=cover_weight.value,
        device=device,
        vectors=kept_vectors(mindscape, first, chooser),
    )
    found = retriever.signatures([query], mode=mode.value)[0]
    pool = retriever.pools([query])[0]
    record: dict[str, Any] = {
        "query": query,
        "encoder": {"name": name, "spec_hash": first.spec_hash},
        "selector": {"name": selector or name, "spec_hash": chooser.spec_hash},
        "k0": k0,
        "k_sum": k_sum or K_SUM,
        "cover": cover.value,
        "cover_weight": cover_weight.value,
        "pool": [opened.sessions[int(row)].id for row in pool.sessions],
        "signature": found.to_dict(),
        "texts": encoders.report.to_dict(),
    }
    emit(_signature_text(opened, found, len(pool.sessions)), record, json_to)


def search(
    context: typer.Context,
    query: QueryOption,
    mindscape: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--mindscape", metavar="DIR", help="Folder of `mindscape build`: search with signatures."),
    ] = None,
    index: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--index", metavar="DIR", help="Or a folder of `index build`: search its vectors alone."),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(help="E2; the mindscape's encoder, without E2, by default. With --index: the one that made it."),
    ] = None,
    e1: Annotated[
        str | None, typer.Option("--e1", help="E1; what the checkpoint of --encoder names by default.")
    ] = None,
    selector: Annotated[str | None, typer.Option(help="Encoder that chooses the signature; E1 by default.")] = None,
    mode: Annotated[
        SearchMode | None,
        typer.Option("--signature", help="What E2 gets beside the question; as it was trained by default."),
    ] = None,
    k: Annotated[int, typer.Option("-k", min=1, help="Chunks, or sessions, to print.")] = 10,
    sessions: Annotated[bool, typer.Option("--sessions", help="With --index: find sessions.")] = False,
    pooling: Annotated[
        Pooled, typer.Option(help="A session's score out of its chunks': with --sessions.")
    ] = Pooled.max,
    where: Annotated[
        Optional[list[str]],  # noqa: UP045
        typer.Option(
            metavar="KEY=VALUE", help="With --index: chunks with this metadata; a key given twice may be either."
        ),
    ] = None,
    alpha: AlphaOption = None,
    k0: K0Option = 50,
    k_sum: KSumOption = None,
    prior: PriorOption = 0.0,
    cover: CoverOption = Cover.member,
    cover_weight: CoverWeightOption = CoverWeight.e1_score,
    candidates: Annotated[Candidates, typer.Option(help="What E2 ranks.")] = Candidates.all,
    backend: BackendOption = Backend.auto,
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Find the chunks of a mindscape, or the chunks or sessions of an index, that answer a question."""
    check_output(json_to, "--json")
    check_query(query)
    if (mindscape is None) == (index is None):
        raise ValueError("give what to search once: either --mindscape DIR or --index DIR")
    check_outside({"--json": json_to}, {"--mindscape": mindscape, "--index": index})
    if index is not None:
        refuse_options(context, _MINDSCAPE_OPTIONS, "--index")
        search_index(index, encoder, query, k, sessions, pooling, where or [], backend.value, device, json_to)
        return
    assert mindscape is not None
    refuse_options(context, INDEX_OPTIONS, "--mindscape")
    check_folder(mindscape, "--mindscape")
    first_name, second_name = search_encoders(mindscape, encoder, e1)
    defaults = run_defaults(second_name)
    if mode is None:
        mode = SearchMode(defaults.signature_mode) if second_name is not None or prior > 0 else SearchMode.none
    if mode is not SearchMode.none and second_name is None and prior == 0:
        raise ValueError(
            "E1 reads the question alone: give --encoder E2, or --prior 0.1 to weigh the signature's sessions"
        )
    encoders = Encoders(device, cache_folder(cache))
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.vectors import kept_vectors
    from mia_serve.retriever import Retriever

    opened = Mindscape.load(mindscape)
    first = encoders.open(first_name)
    if encoder is None and e1 is None:
        check_kept(mindscape, first_name, first)
    second = encoders.open(second_name) if second_name is not None else None
    chooser = encoders.open(selector) if selector is not None else first
    retriever = Retriever(
        opened,
        first,
        second,
        chooser,
        k0=k0,
        k_sum=k_sum or defaults.k_sum,
        prior=prior,
        cover=cover.value,
        cover_weight=cover_weight.value,
        alpha=alpha,
        candidates=candidates.value,
        backend=backend.value,
        device=device,
        vectors=kept_vectors(mindscape, first, second, chooser),
    )
    results = retriever.search([query], k=k, signature=mode.value)
    chunks = {chunk.id: chunk for chunk in opened.chunks}
    hits = [
        {
            "rank": rank,
            "id": chunk_id,
            "score": float(score),
            "session_id": chunks[chunk_id].session_id,
            "book_id": chunks[chunk_id].book_id,
            "text": chunks[chunk_id].text,
        }
        for rank, (chunk_id, score) in enumerate(zip(results.hits.ids[0], results.hits.scores[0], strict=False), 1)
    ]
    found = results.signatures[0] if results.signatures is not None else None
    record = {
        "query": query,
        "e1": {"name": first_name, "spec_hash": first.spec_hash},
        "e2": None if second is None else {"name": second_name, "spec_hash": second.spec_hash},
        "signature": None if found is None else found.to_dict(),
        "hits": hits,
        "texts": encoders.report.to_dict(),
    }
    lines = [f"{hit['rank']:>3}  {hit['score']:.4f}  {hit['id']}  {_snippet(str(hit['text']))}" for hit in hits]
    text = "" if found is None else "signature: " + ", ".join(found.session_ids) + "\n"
    emit(text + "\n".join(lines) + "\n", record, json_to)


def search_encoders(mindscape: Path, encoder: str | None, e1: str | None) -> tuple[str, str | None]:
    """Return the names of first and second encoder; an E2 whose E1 is not known searches alone for the pool too."""
    second = chosen(encoder, None)
    defaults = run_defaults(second)
    first = chosen(e1, defaults.e1) or second
    if first is None:
        first = default_encoder(mindscape)
    return first, second


def _signature_text(mindscape: Mindscape, found: Signature, pool_size: int) -> str:
    if found.mode == Mode.global_summary:
        return f"{found.mode}: a book of {len(found.session_ids)} sessions\n{found.text}\n"
    sessions = {session.id: session for session in mindscape.sessions}
    lines = [f"{found.mode}: {len(found.session_ids)} of {pool_size} sessions in the pool"]
    if found.terms is not None:
        lines.append("  ".join(f"{name} {value:.3f}" for name, value in found.terms.items()))
    for i, session_id in enumerate(found.session_ids):
        gain = f"{found.gains[i]:.4f}" if i < len(found.gains) else "      "
        lines.append(f"{i + 1:>3}  {gain}  {session_id}  {_snippet(sessions[session_id].summary)}")
    return "\n".join(lines) + "\n"


def _snippet(text: str) -> str:
    flat = " ".join(text.split())
    return flat if len(flat) <= _SNIPPET else flat[: _SNIPPET - 1] + "…"
