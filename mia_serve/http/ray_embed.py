"""A mindscape's vectors made by many processes: Ray Data hands out texts, and an encoder in each encodes them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from mia_serve.core.cached_encoder import CachedEncoder
from mia_serve.core.errors import MiaError
from mia_serve.core.vector_cache import CacheReport, VectorCache, encoder_facts
from mia_serve.mindscape import Mindscape
from mia_serve.mindscape.vectors import PARTS, vector_name

_BATCH = 256  # texts that a process encodes at a time; the encoder cuts them into forwards of its own size
_BLOCK = 16 * _BATCH  # texts in one block of Ray's object store
_KEEP_TEXTS, _KEEP_SECONDS = 4096, 60.0  # a run that is killed loses at most so many vectors, or so much time


class Workers(NamedTuple):
    """The processes that encode.

    Attributes:
        model: Folder, hub id or ``package:module/path``, the same on every node.
        device: Of each process.
        number: How many; None: one for every GPU of the cluster, or for every CPU where the device is "cpu".
    """

    model: str
    device: str = "auto"
    number: int | None = None


class BatchEncoder:
    """Loads an encoder once and encodes batch after batch; runs in a process of Ray.

    Args:
        model: What to load.
        device: Where it runs.
        spec_hash: Of the encoder that is meant.

    Raises:
        MiaError: The model on this node is another.
    """

    def __init__(self, model: str, device: str, spec_hash: str) -> None:
        from mia_serve.core import Encoder

        self.encoder = Encoder.load(model, device=device)
        found = self.encoder.spec_hash
        if found != spec_hash:
            raise MiaError(
                f"{model} on this node has spec hash {found}, the command's has {spec_hash}: give all nodes the same "
                "model, and the number format of one device"
            )

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Return the vectors of a batch with the rows that they belong to."""
        return {"row": batch["row"], "vector": self.encoder.encode_documents(batch["text"].tolist())}


def open_encoder(workers: Workers, cache: Path | None, report: CacheReport) -> CachedEncoder:
    """Open the workers' encoder in this process, on the CPU: it gives the hash and the cache, and encodes nothing.

    Raises:
        MiaError: The cluster has no room for a worker, or the model is none.
    """
    from mia_serve.core import Encoder

    on_gpu, _ = _place(workers)
    plain = Encoder.load(workers.model, device="cpu", dtype="bfloat16" if on_gpu else "float32")
    return CachedEncoder(plain, cache, report)


def embed_on_ray(
    mindscape: Mindscape,
    encoder: CachedEncoder,
    workers: Workers,
    have: dict[str, tuple[np.ndarray, str]] | None = None,
    progress: Callable[[str], None] | None = None,
) -> dict[str, tuple[np.ndarray, str]]:
    """Encode chunks and summaries, except what is there already, on the cluster that this process is connected to.

    The same vectors as `embed_mindscape` makes, up to the last bits that the make-up of a batch decides. What is done
    goes into the encoder's cache as it comes, so that a run that was killed goes on where it stopped.

    Args:
        mindscape: What to encode.
        encoder: Says which vectors are meant, and keeps its cache.
        workers: What encodes.
        have: What `all_vectors` returns.
        progress: Called with a line at each step.

    Returns:
        Vector files as `Mindscape.save` takes them.

    Raises:
        RuntimeError: A process failed, and so did the ones that took its place.
    """
    texts = {
        "chunks": [chunk.text for chunk in mindscape.chunks],
        "sessions": [session.summary for session in mindscape.sessions],
    }
    spec_hash = encoder.spec_hash
    asked = [part for part in PARTS if vector_name(part, spec_hash) not in (have or {})]
    together = [text for part in asked for text in texts[part]]  # one run of the workers for all
    if progress is not None:
        progress(f"encoding {' and '.join(f'{len(texts[part])} {part}' for part in asked) or 'nothing'}")
    vectors = _embed_texts(together, encoder, workers)
    made, start = {}, 0
    for part in asked:
        stop = start + len(texts[part])
        made[vector_name(part, spec_hash)] = (vectors[start:stop], spec_hash)
        start = stop
    return made


def _embed_texts(texts: list[str], encoder: CachedEncoder, workers: Workers) -> np.ndarray:
    """Return the (n, d) vectors of texts as documents, each different one encoded once, and only if it is not known."""
    place: dict[str, int] = {}
    places = np.fromiter((place.setdefault(text, len(place)) for text in texts), np.int64, len(texts))
    different = list(place)
    vectors = np.empty((len(different), encoder.dim), np.float32)
    cache = None if encoder.cache is None else VectorCache(encoder.cache, encoder_facts(encoder, "document"))
    missing = list(range(len(different))) if cache is None else cache.fill(different, vectors)
    encoder.report.encoded += len(missing)
    encoder.report.known += len(different) - len(missing)
    encoder.report.repeated += len(texts) - len(different)
    # The longest first, so that texts of like length share a batch and the last batches are short ones.
    missing.sort(key=lambda row: (-len(different[row]), row))
    waiting: list[int] = []
    written = time.monotonic()
    try:
        for rows, found in _encoded(different, missing, encoder, workers):
            vectors[rows] = found
            waiting += rows.tolist()
            if cache is not None and (len(waiting) >= _KEEP_TEXTS or time.monotonic() - written > _KEEP_SECONDS):
                cache.add([different[row] for row in waiting], vectors[waiting])
                waiting, written = [], time.monotonic()
    finally:
        if cache is not None and waiting:
            cache.add([different[row] for row in waiting], vectors[waiting])
    return vectors[places]


def _encoded(
    texts: list[str], rows: list[int], encoder: CachedEncoder, workers: Workers
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield rows and their vectors as the workers finish them, in any order."""
    if not rows:
        return
    import pyarrow as pa
    import ray.data

    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False
    on_gpu, there = _place(workers)
    count = min(workers.number or there, there)
    # A block goes to one worker as a whole: each is to get several, so that none waits long for the last.
    block = max(1, min(_BLOCK, -(-len(rows) // (4 * count))))
    parts = [rows[i : i + block] for i in range(0, len(rows), block)]
    tables = [pa.table({"row": part, "text": [texts[row] for row in part]}) for part in parts]
    encoded = ray.data.from_arrow(tables).map_batches(
        BatchEncoder,
        fn_constructor_args=(workers.model, workers.device, encoder.spec_hash),
        batch_size=min(_BATCH, block),
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=count),
        num_cpus=1,
        num_gpus=int(on_gpu),
    )
    for batch in encoded.iter_batches(batch_size=None, batch_format="numpy"):
        yield np.asarray(batch["row"]), np.asarray(batch["vector"], np.float32)


def _place(workers: Workers) -> tuple[bool, int]:
    """Return whether the workers run on GPUs, and how many the cluster has room for."""
    import ray

    resources = ray.cluster_resources()
    on_gpu = workers.device.startswith("cuda") or (workers.device == "auto" and resources.get("GPU", 0) > 0)
    there = int(resources.get("GPU" if on_gpu else "CPU", 0))
    if not there:
        raise MiaError(f"the Ray cluster has no {'GPU' if on_gpu else 'CPU'}: add a node, or give another --device")
    return on_gpu, there
