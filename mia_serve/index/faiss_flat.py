"""FAISS flat indexes as a first stage, on the CPU or on all GPUs.

FAISS keeps a copy of the vectors of its own. Deleted chunks stay in it until a compaction and are masked.
"""

from __future__ import annotations

import threading
from typing import Any, NamedTuple

import numpy as np
import torch

from mia_serve.core.errors import MiaError
from mia_serve.index.blocks import VectorBlocks
from mia_serve.index.collect import Candidates
from mia_serve.index.flat import import_faiss

GPU_LIMIT = 2048  # the most that a FAISS GPU index returns for a query

_SPARE = 16  # fetched beyond k so that the boundary of k can be proved free of ties
_TALL = 1 << 14  # vectors added at once
_FLOAT16_LIMIT = 65504.0


class GpuOptions(NamedTuple):
    """How FAISS uses the GPUs.

    Attributes:
        float16: Keep the vectors in half precision there: half the memory; results stay exact, as they are settled
            from the vectors on the host.
        replicate: Every GPU holds all vectors and takes a share of the queries; False: each holds a share of the
            vectors.
        temp_memory: Bytes of scratch space a GPU; None: FAISS's choice, up to 1.5 GiB.
    """

    float16: bool = False
    replicate: bool = False
    temp_memory: int | None = None


def has_gpu(faiss: Any) -> bool:
    """Tell whether this FAISS was built for GPUs and sees one."""
    return hasattr(faiss, "StandardGpuResources") and faiss.get_num_gpus() > 0


class FaissFlat:
    """IndexFlatIP over all positions, brought up to date before each search.

    Args:
        dim: Width d.
        gpu: Search on all GPUs with these options; None: on the CPU.
    """

    def __init__(self, dim: int, gpu: GpuOptions | None) -> None:
        self._faiss, self._dim, self._gpu = import_faiss(), dim, gpu
        self._lock = threading.Lock()
        self._on_gpu: Any = None
        self._resources: list[Any] = []
        self._cpu: Any = self._faiss.IndexFlatIP(dim)

    def takes(self, k: int, vectors: VectorBlocks, allowed: np.ndarray | None) -> bool:
        """Tell whether the index can answer; a GPU has a limit on k, no masks, and few dead chunks to fetch beside."""
        if self._gpu is None:
            return True
        dead = 0 if allowed is None else len(allowed) - int(allowed.sum())
        fits = not self._gpu.float16 or vectors.max_norm() < _FLOAT16_LIMIT
        return fits and min(k + self._spare(k) + dead, len(vectors)) <= GPU_LIMIT

    def candidates(
        self,
        queries: torch.Tensor,
        vectors: VectorBlocks,
        k: int,
        margin: torch.Tensor,
        allowed: np.ndarray | None,
    ) -> Candidates:
        """Fetch somewhat more than the k best; arguments and result as in ``collect``."""
        index = self._updated(vectors)
        usable = len(vectors) if allowed is None else int(allowed.sum())
        given = np.ascontiguousarray(queries.cpu().numpy())
        error = margin.cpu().numpy()
        if self._gpu is None:
            fetch = min(usable, k + self._spare(k))
            masked = {} if allowed is None else {"params": self._mask(allowed)}
            scores, rows = index.search(given, fetch, **masked)
        else:
            fetch = min(len(vectors), k + self._spare(k) + len(vectors) - usable)
            scores, rows = index.search(given, fetch)
            if self._gpu.float16:
                error = error + self._half_error(given, vectors.max_norm())
        floor = scores.min(axis=1) + error if fetch < len(vectors) else np.full(len(given), -np.inf)
        if allowed is None or self._gpu is None:
            keep = rows >= 0
            if fetch == usable:
                floor = np.full(len(given), -np.inf)
        else:
            keep = (rows >= 0) & allowed[rows]
        return Candidates(np.nonzero(keep)[0], rows[keep].astype(np.int64), floor.astype(np.float32))

    def _half_error(self, queries: np.ndarray, max_norm: float) -> np.ndarray:
        """Bound what rounding queries and vectors to float16 adds: 2⁻¹¹ of a number, 2⁻²⁵ where it is subnormal."""
        norms = np.linalg.norm(queries.astype(np.float64), axis=1)
        relative = 2.01 * 2.0**-11 * norms * max_norm
        error = 1.01 * (relative + 2.0**-25 * self._dim**0.5 * (norms + max_norm + 1.0))
        return np.where(norms < _FLOAT16_LIMIT, error, np.inf)

    def _spare(self, k: int) -> int:
        return max(_SPARE, k) if self._gpu is not None and self._gpu.float16 else _SPARE

    def _mask(self, allowed: np.ndarray) -> Any:
        bits = np.packbits(allowed, bitorder="little")
        return self._faiss.SearchParameters(sel=self._faiss.IDSelectorBitmap(bits))

    def _updated(self, vectors: VectorBlocks) -> Any:
        with self._lock:
            return self._update(vectors)

    def _update(self, vectors: VectorBlocks) -> Any:
        index = self._cpu if self._on_gpu is None else self._on_gpu
        if index.ntotal == len(vectors):
            return index
        if self._gpu is None:
            for _, tile in vectors.tiles(_TALL, index.ntotal):
                index.add(np.ascontiguousarray(tile.cpu().numpy()))
            return index
        # A sharded index cannot be added to; the host's copy is made for the transfer only.
        self._on_gpu, self._resources = None, []
        whole = self._faiss.IndexFlatIP(self._dim)
        for _, tile in vectors.tiles(_TALL):
            whole.add(np.ascontiguousarray(tile.cpu().numpy()))
        self._on_gpu, self._resources = to_gpus(self._faiss, whole, self._gpu)
        return self._on_gpu


def to_gpus(faiss: Any, index: Any, options: GpuOptions) -> tuple[Any, list[Any]]:
    """Copy a CPU index to all GPUs; also returns the resources, which have to live as long as the copy.

    Raises:
        MiaError: If this FAISS has no GPU support or sees no GPU.
    """
    if not has_gpu(faiss):
        raise MiaError("FAISS sees no GPU: install faiss-gpu, or use device='cpu' or backend='torch'")
    resources = [faiss.StandardGpuResources() for _ in range(faiss.get_num_gpus())]
    if options.temp_memory is not None:
        for resource in resources:
            resource.setTempMemory(options.temp_memory)
    cloner = faiss.GpuMultipleClonerOptions()
    cloner.useFloat16 = options.float16
    cloner.shard = not options.replicate
    return faiss.index_cpu_to_gpu_multiple_py(resources, index, cloner), resources


def faiss_device(device: str | torch.device, gpu: GpuOptions | None) -> tuple[torch.device, GpuOptions | None]:
    """Return where vectors are settled, and the options where FAISS searches on GPUs."""
    on_gpu = has_gpu(import_faiss())
    wanted = torch.device(device) if device != "auto" else None
    if wanted is not None and wanted.type == "cpu":
        if gpu is not None:
            raise MiaError("backend 'faiss' on cpu with GPU options: leave gpu out, or device='auto'")
        return wanted, None
    if wanted is not None and wanted.type != "cuda":
        raise MiaError(f"backend 'faiss' with device {device!r}: allowed are auto, cpu, cuda; or use backend='torch'")
    if not on_gpu and (wanted is not None or gpu is not None):
        raise MiaError(f"backend 'faiss' with device {device!r}: FAISS sees no GPU; use 'cpu' or backend='torch'")
    if not on_gpu:
        return torch.device("cpu"), None
    return torch.device("cuda" if torch.cuda.is_available() else "cpu"), gpu or GpuOptions()
