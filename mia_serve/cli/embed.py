"""``mia-serve embed``: vectors of a mindscape, kept with it under the hash of their encoder."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Optional

import typer

from mia_serve.cli.common import (
    CacheOption,
    DeviceOption,
    Encoders,
    JsonOption,
    MindscapeOption,
    cache_folder,
    check_folder,
    check_output,
    check_outside,
    emit,
    progress,
    read_object,
)

if TYPE_CHECKING:
    import numpy as np

    from mia_serve.core import Encoder
    from mia_serve.mindscape import Mindscape

#: Note in a mindscape's folder: the encoder that it was built with, default of --encoder.
BUILT_WITH = "encoder.json"


class Engine(StrEnum):
    """What encodes."""

    local = "local"
    ray = "ray"


def embed(
    mindscape: MindscapeOption,
    encoder: Annotated[str, typer.Option(help="Folder, hub id or package:module/path.")],
    cache: CacheOption = None,
    device: DeviceOption = "auto",
    engine: Annotated[Engine, typer.Option(help="This process, or the workers of a Ray cluster.")] = Engine.local,
    ray_address: Annotated[
        str, typer.Option("--ray-address", help="HOST:PORT of the cluster, auto, or local: this machine alone.")
    ] = "local",
    workers: Annotated[
        Optional[int],  # noqa: UP045
        typer.Option(min=1, help="Of Ray; by default one for every GPU, or CPU where there are none."),
    ] = None,
    json_to: JsonOption = None,
) -> None:
    """Add an encoder's vectors of all chunks and summaries to a mindscape; later commands then need not encode them."""
    check_output(json_to, "--json")
    check_folder(mindscape, "--mindscape")
    check_outside({"--json": json_to}, {"--mindscape": mindscape})
    encoders = Encoders(device, cache_folder(cache))
    from mia_serve.mindscape import Mindscape
    from mia_serve.mindscape.vectors import all_vectors, embed_mindscape

    opened = Mindscape.load(mindscape)
    kept = all_vectors(mindscape)
    model: Encoder
    if engine is Engine.ray:
        model, made = _on_ray(opened, kept, encoder, encoders, ray_address, workers)
    else:
        model = encoders.open(encoder)
        made = embed_mindscape(opened, model, kept, progress())
    encoders.report.known += sum(
        len(array) for name, (array, spec_hash) in kept.items() if spec_hash == model.spec_hash and name not in made
    )
    opened.save(mindscape, vectors=kept | made)
    record = {
        "mindscape": str(mindscape),
        "encoder": encoder,
        "spec_hash": model.spec_hash,
        "dim": model.dim,
        "chunks": len(opened.chunks),
        "sessions": len(opened.sessions),
        "texts": encoders.report.to_dict(),
    }
    text = (
        f"{mindscape}: {record['chunks']} chunks and {record['sessions']} summaries, dim {model.dim}, "
        f"{model.spec_hash}\n{encoders.report.to_text()}\n"
    )
    emit(text, record, json_to)


def _on_ray(
    mindscape: Mindscape,
    kept: dict[str, tuple[np.ndarray, str]],
    name: str,
    encoders: Encoders,
    address: str,
    count: int | None,
) -> tuple[Encoder, dict[str, tuple[np.ndarray, str]]]:
    """Encode on a Ray cluster; return the encoder that says which vectors those are, and the vectors."""
    from mia_serve.http.ray_cluster import connected
    from mia_serve.http.ray_embed import Workers, embed_on_ray, open_encoder

    # The workers run elsewhere, with other working folders.
    found = Workers(str(Path(name).absolute()) if Path(name).is_dir() else name, encoders.device, count)
    with connected(address):
        model = open_encoder(found, encoders.cache, encoders.report)
        return model, embed_on_ray(mindscape, model, found, kept, progress())


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
    from mia_serve.mindscape.vectors import stored_vectors

    if stored_vectors(path, "chunks", encoder) is None:
        raise ValueError(
            f"{path} keeps no vectors of its encoder {name} as it is now (spec hash {encoder.spec_hash}): the "
            "checkpoint or its number format has changed; run `mia-serve embed` with it, or encode once with --encoder"
        )
