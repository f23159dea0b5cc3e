"""``mia-serve embed`` and ``mia-serve index``: vectors of a mindscape, kept with the hash of their encoder."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mia_serve.cli.common import (
    DeviceOption,
    JsonOption,
    check_folder,
    check_output,
    emit,
    load_encoder,
    progress,
    read_object,
    write_file,
)

if TYPE_CHECKING:
    import numpy as np

    from mia_serve.core import Encoder
    from mia_serve.mindscape import Mindscape

app = typer.Typer(help="Build and inspect vector indexes.", no_args_is_help=True)

MindscapeOption = Annotated[Path, typer.Option("--mindscape", metavar="DIR", help="Folder of `mindscape build`.")]
#: What is embedded of a mindscape: passages, and the summaries of its sessions.
PARTS = ("chunks", "sessions")
#: Note in a mindscape's folder: the encoder that it was built with, default of --encoder.
BUILT_WITH = "encoder.json"


def embed(
    mindscape: MindscapeOption,
    encoder: Annotated[str, typer.Option(help="Folder, hub id or package:module/path.")],
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Add an encoder's vectors of all chunks and summaries to a mindscape; later commands then need not encode them."""
    check_output(json_to, "--json")
    check_folder(mindscape, "--mindscape")
    from mia_serve.mindscape import Mindscape

    opened = Mindscape.load(mindscape)
    model = load_encoder(encoder, device)
    kept = all_vectors(mindscape)
    kept |= embed_mindscape(opened, model, kept)
    note = mindscape / BUILT_WITH
    built_with = note.read_text(encoding="utf-8") if note.is_file() else None
    # Written aside and renamed as a whole, so the note would go with the old folder.
    opened.save(mindscape, vectors=kept)
    if built_with is not None:
        write_file(note, built_with)
    record = {
        "mindscape": str(mindscape),
        "encoder": encoder,
        "spec_hash": model.spec_hash,
        "dim": model.dim,
        "chunks": len(opened.chunks),
        "sessions": len(opened.sessions),
    }
    text = (
        f"{mindscape}: {record['chunks']} chunks and {record['sessions']} summaries, dim {model.dim}, {model.spec_hash}"
    )
    emit(text + "\n", record, json_to)


@app.command("build")
def build(
    mindscape: MindscapeOption,
    encoder: Annotated[str, typer.Option(help="Encoder of the chunks.")],
    out: Annotated[Path, typer.Option("-o", "--out", metavar="DIR", help="Folder to write.")],
    device: DeviceOption = "auto",
    json_to: JsonOption = None,
) -> None:
    """Index the chunks of a mindscape."""
    check_output(json_to, "--json")
    check_folder(mindscape, "--mindscape")
    check_output(out, "--out", overwrite=False)
    from mia_serve.index import SessionIndex
    from mia_serve.mindscape import Mindscape

    opened = Mindscape.load(mindscape)
    model = load_encoder(encoder, device)
    vectors = chunk_vectors(mindscape, opened, model)
    index = SessionIndex(model.dim, device="cpu", spec_hash=model.spec_hash)
    index.add([chunk.id for chunk in opened.chunks], vectors, [chunk.session_id for chunk in opened.chunks])
    index.save(out)
    record = {"index": str(out), "rows": len(index), "dim": index.dim, "spec_hash": index.spec_hash, "encoder": encoder}
    emit(f"{out}: {len(index)} chunks, dim {index.dim}, encoder {index.spec_hash}\n", record, json_to)


@app.command("info")
def info(
    index: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of `index build`.")],
    json_to: JsonOption = None,
) -> None:
    """Print what an index holds and which encoder made it."""
    check_output(json_to, "--json")
    from mia_serve.index import SessionIndex

    opened = SessionIndex.load(index, device="cpu")
    size = sum(file.stat().st_size for file in index.iterdir() if file.is_file())
    record = {
        "index": str(index),
        "rows": len(opened),
        "dim": opened.dim,
        "spec_hash": opened.spec_hash,
        "bytes": size,
        "first_ids": list(opened.ids[:3]),
    }
    text = f"{index}: {len(opened)} chunks, dim {opened.dim}, encoder {opened.spec_hash}, {size / 2**20:.1f} MiB\n"
    emit(text, record, json_to)


def vector_name(part: str, spec_hash: str) -> str:
    """Name a mindscape's vector file: one a part and encoder, so that several encoders live side by side."""
    return f"{part}-{spec_hash}"


def all_vectors(path: Path) -> dict[str, tuple[np.ndarray, str]]:
    """Open every vector file of a mindscape."""
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.store import read_manifest

    entries = read_manifest(path)["vectors"]
    return {
        name: (Mindscape.load_vectors(path, name, entry["spec_hash"]), entry["spec_hash"])
        for name, entry in entries.items()
    }


def embed_mindscape(
    mindscape: Mindscape, encoder: Encoder, have: dict[str, tuple[np.ndarray, str]] | None = None
) -> dict[str, tuple[np.ndarray, str]]:
    """Encode chunks and summaries, except what is there already.

    Returns:
        Vector files as `Mindscape.save` takes them: name -> ((rows, d) array, spec hash).
    """
    texts = {
        "chunks": [chunk.text for chunk in mindscape.chunks],
        "sessions": [session.summary for session in mindscape.sessions],
    }
    spec_hash = encoder.spec_hash
    say = progress()
    made = {}
    for part in PARTS:
        name = vector_name(part, spec_hash)
        if have is None or name not in have:
            say(f"encoding {len(texts[part])} {part}")
            made[name] = (encoder.encode_documents(texts[part]), spec_hash)
    return made


def stored_vectors(path: Path, part: str, encoder: Encoder) -> np.ndarray | None:
    """Open an encoder's vectors of one part of a mindscape, if they were kept."""
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.store import read_manifest

    name = vector_name(part, encoder.spec_hash)
    if name not in read_manifest(path)["vectors"]:
        return None
    return Mindscape.load_vectors(path, name, encoder.spec_hash)


def kept_vectors(path: Path, *encoders: Encoder | None) -> dict[str, np.ndarray]:
    """Collect the vectors that a mindscape keeps of these encoders, under the keys that `Retriever` looks for."""
    found: dict[str, np.ndarray] = {}
    for encoder in encoders:
        if encoder is None or encoder.spec_hash in found:
            continue
        for part in PARTS:
            vectors = stored_vectors(path, part, encoder)
            if vectors is not None:
                found[encoder.spec_hash + ("/sessions" if part == "sessions" else "")] = vectors
    return found


def chunk_vectors(path: Path, mindscape: Mindscape, encoder: Encoder) -> np.ndarray:
    """Return an encoder's chunk vectors, (n_chunks, d): those kept with the mindscape, else encoded now."""
    stored = stored_vectors(path, "chunks", encoder)
    if stored is not None:
        return stored
    return encoder.encode_documents([chunk.text for chunk in mindscape.chunks])


def default_encoder(path: Path) -> str:
    """Return the encoder that a mindscape was built with.

    Raises:
        ValueError: The folder does not say.
    """
    note = path / BUILT_WITH
    if not note.is_file():
        raise ValueError(f"{path} does not name the encoder it was built with; give --encoder")
    name = read_object(note).get("encoder")
    if not isinstance(name, str):
        raise ValueError(f"{note} names no encoder; give --encoder")
    return name


def check_kept(path: Path, name: str, encoder: Encoder) -> None:
    """Refuse the encoder that a mindscape names where it is no longer the one that made the mindscape's vectors.

    Raises:
        ValueError: No vectors of this encoder are kept; the message names its hash and the fix.
    """
    if stored_vectors(path, "chunks", encoder) is None:
        raise ValueError(
            f"{path} keeps no vectors of its encoder {name} as it is now (spec hash {encoder.spec_hash}): the "
            "checkpoint or its number format has changed; run `mia-serve embed` with it, or encode once with --encoder"
        )
