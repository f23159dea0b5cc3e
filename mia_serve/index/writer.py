"""Change an index folder: one writer at a time, all of a change or nothing.

A commit writes new files beside the old ones, flushes them, and renames a new manifest over the old one. Whatever
stops a writer, kill -9 and a full disk included, leaves the index of the last commit.
"""

from __future__ import annotations

import errno
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from pathlib import Path
from types import TracebackType
from typing import NamedTuple, Self, cast

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.core.storage import lock_file, sync, unlock_file
from mia_serve.index.arguments import Metadata, check_chunks
from mia_serve.index.manifest import (
    LOCK,
    MANIFEST,
    DamagedManifest,
    FileEntry,
    Manifest,
    generation_by_names,
    holds_only_leftovers,
    parse_manifest,
    read_manifest_bytes,
    replace_manifest,
    sweep,
)
from mia_serve.index.segment_stack import SegmentStack
from mia_serve.index.segment_writer import metadata_lines, write_file
from mia_serve.index.store import check_spec_hash, read_entries, read_ranges, split_ids
from mia_serve.index.vectors import (
    Storage,
    calibrate,
    check_float16,
    check_storage,
    check_strings,
    encode_storage,
    quantise,
)

_WRITE_BYTES = 1 << 23  # of float32 vectors that are converted at once
_SAMPLE = 1 << 16  # vectors that int8 ranges are calibrated on, at most


class _Chunks(NamedTuple):
    """Chunks that passed all checks."""

    ids: list[str]
    vectors: np.ndarray
    sessions: list[str]
    metadata: list[bytes] | None


class IndexWriter:
    """Add to, delete from, or make an index in one transaction.

        with IndexWriter(path, dim=384, spec_hash=encoder.spec_hash) as writer:
            for block in blocks:
                writer.add(block.ids, block.vectors, block.sessions)

    The block holds the writers' lock. At its end everything is committed; if it raises, nothing is. Vectors go straight
    to a file: memory holds one block, and the ids of the whole index.

    A chunk's row number is given in order of insertion, is never given again, and never changes. An updated chunk is a
    new one. A commit that leaves more deleted rows than live ones compacts the index; one that leaves more than 32
    segments merges the newest, going back as long as the next is not larger than twice what is merged so far.

    Args:
        path: The folder; made if it is missing. What is in it is added to.
        dim: Width d of the vectors; may be left out for an index that exists, as all that follows.
        spec_hash: Hash of the encoder that makes the vectors.
        storage: "float32" (the default), "float16" or "int8".
        ranges: int8 ranges (2, d) of a new index as in Block; None: calibrated on the first vectors added.
        replace: Start empty, with row 0; what is in the folder, an index with a damaged manifest too, goes when the
            first commit is made.
        timeout: Seconds to wait for the lock.

    Raises:
        MiaError: On entering the block, if path is something else than an index, the index does not agree with an
            argument, or it is damaged.
        TimeoutError: On entering, if another writer holds the lock.
        OSError: On any change that cannot be written, a full disk for one. The writer is of no use after that; leave
            the block, and the index is what it was.
    """

    def __init__(
        self,
        path: str | Path,
        dim: int | None = None,
        *,
        spec_hash: str | None = None,
        storage: Storage | None = None,
        ranges: np.ndarray | None = None,
        replace: bool = False,
        timeout: float = 0.0,
    ) -> None:
        if dim is not None and dim < 1:
            raise MiaError(f"dim={dim}: give the width of the vectors, at least 1")
        if storage is not None:
            check_storage(storage)
        self._path = Path(path)
        self._given = (dim, spec_hash, storage, ranges)
        self._replace, self._timeout = replace, timeout
        self._lock: int | None = None
        self._generation = self._next_row = 0
        self._row_of: dict[str, int] = {}

    def __enter__(self) -> Self:
        self._made = not self._path.exists()
        self._lock = self._take_lock()
        self._stack: SegmentStack | None = None
        try:
            self._open()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                self.commit()
        finally:
            self._release()

    def __len__(self) -> int:
        return len(self._row_of)

    def __contains__(self, chunk_id: object) -> bool:
        return chunk_id in self._row_of

    @property
    def next_row(self) -> int:
        """Number that the next chunk gets."""
        return self._next_row

    def add(
        self,
        ids: Sequence[str],
        vectors: np.ndarray,
        sessions: Sequence[str],
        metadata: Metadata = None,
        rows: np.ndarray | None = None,
    ) -> None:
        """Append chunks; on a wrong input none of them.

        Args:
            ids: n new chunk ids.
            vectors: (n, d) finite numbers.
            sessions: Session id of each chunk.
            metadata: An object of JSON values or None a chunk.
            rows: Ascending row numbers from next_row on, for a copy of an index that keeps them; None: the next ones.

        Raises:
            MiaError: If an id is not a string, is empty, repeated or in the index, a vector is not finite or not (n,
                d), or a number does not fit the storage.
        """
        chunks = self._checked(ids, vectors, sessions, metadata)
        if not self._row_of.keys().isdisjoint(chunks.ids):
            position, name = next((i, name) for i, name in enumerate(chunks.ids) if name in self._row_of)
            raise MiaError(f"id {name!r} (position {position}) is already in the index: delete it first, or upsert")
        numbers = self._new_rows(len(chunks.ids), rows)
        with self._changing():
            self._append(chunks, numbers)

    def delete(self, ids: Sequence[str]) -> None:
        """Remove chunks by id.

        Raises:
            MiaError: If an id is not in the index or is given twice; nothing is removed then.
        """
        self._check_usable()
        names = check_strings(ids, "ids")
        unknown = next((name for name in names if name not in self._row_of), None)
        if unknown is not None or len(set(names)) != len(names):
            twice = Counter(names).most_common(1)[0][0]
            what = f"id {unknown!r} is not in the index" if unknown is not None else f"id {twice!r} is given twice"
            raise MiaError(f"{what}: nothing was deleted; give ids of the index once each")
        with self._changing():
            self._bury(names)

    def upsert(
        self, ids: Sequence[str], vectors: np.ndarray, sessions: Sequence[str], metadata: Metadata = None
    ) -> None:
        """Add chunks, and replace those that are in the index: vector, session, metadata and row number are new.

        Raises:
            MiaError: As in add, but for ids that are in the index.
        """
        chunks = self._checked(ids, vectors, sessions, metadata)
        numbers = self._new_rows(len(chunks.ids), None)
        with self._changing():
            self._bury([name for name in chunks.ids if name in self._row_of])
            self._append(chunks, numbers)

    def skip_rows(self, next_row: int) -> None:
        """Give no row number below next_row; for a copy of an index whose last rows were deleted."""
        self._check_usable()
        if next_row > self._next_row:
            self._next_row, self._changed = next_row, True

    def compact(self) -> None:
        """Copy the live rows into one segment, in their order and with their numbers; the others go at the commit."""
        self._check_usable()
        with self._changing() as stack:
            self._changed |= stack.compact()

    def commit(self) -> int:
        """Make all changes so far the index's state, durably, and go on.

        Returns:
            Number of the commit (generation); that of the last one if nothing changed.
        """
        self._check_usable()
        if not self._changed:
            return self._generation
        with self._changing() as stack:
            stack.tidy()
            manifest = self._manifest(stack)
            sync(self._path)
            if not self._generation:
                sync(self._path.absolute().parent)
            replace_manifest(self._path, manifest)
            self._generation, self._changed = manifest.generation, False
            stack.committed(manifest.generation)
        sweep(self._path, manifest)
        self._warn_of_clipping()
        return manifest.generation

    def _take_lock(self) -> int:
        if self._path.exists() and not self._path.is_dir():
            raise MiaError(f"{self._path}: is a file; give a folder")
        if self._path.is_dir() and not (self._path / MANIFEST).exists() and not holds_only_leftovers(self._path):
            raise MiaError(f"{self._path}: exists and is no index (no {MANIFEST}); give a new folder or an index")
        while True:
            self._path.mkdir(parents=True, exist_ok=True)
            try:
                return lock_file(self._path / LOCK, self._timeout)
            except FileNotFoundError:  # another writer just gave up an index that it could not make
                self._made = True

    def _open(self) -> None:
        """Read the index's state, and remove what a dead writer left."""
        self._dim, self._spec_hash, self._storage, self._ranges = self._given
        self._ranges_file: FileEntry | None = None
        self._row_of = {}
        self._clipped = self._quantised = self._generation = self._next_row = 0
        self._broken, self._changed = False, True
        manifest = None
        try:
            if (self._path / MANIFEST).exists():
                manifest = parse_manifest(self._path, read_manifest_bytes(self._path))
                self._generation = manifest.generation
            sweep(self._path, manifest)
        except DamagedManifest:
            # Nothing says what it listed: all files stay until the commit, and new names come after theirs.
            found = generation_by_names(self._path) if self._replace else None
            if found is None:
                raise
            self._generation = found
        if manifest is None or self._replace:
            self._start()
        else:
            self._agree(manifest)
        self._stack = SegmentStack(self._path, cast(int, self._dim), cast(str, self._storage), self._generation)
        if manifest is None or self._replace:
            return
        self._changed, self._next_row, self._ranges_file = False, manifest.next_row, manifest.ranges
        self._ranges = read_ranges(self._path, manifest)
        for segment in manifest.segments:
            entries = read_entries(self._path, segment)
            ids = compress(split_ids(entries.ids, entries.offsets), entries.alive.tolist())
            self._row_of.update(zip(ids, entries.rows[entries.alive].tolist(), strict=True))
            self._stack.load(segment, entries.rows, entries.alive)

    def _start(self) -> None:
        if self._dim is None:
            raise MiaError(f"{self._path}: a new index needs dim, the width of its vectors")
        self._storage = self._storage or "float32"
        if self._ranges is not None:
            self._ranges = np.asarray(self._ranges, np.float32)
            if self._storage != "int8" or self._ranges.shape != (2, self._dim):
                raise MiaError(
                    f"ranges {self._ranges.shape} with storage {self._storage!r}: expected (2, {self._dim}) and 'int8'"
                )

    def _agree(self, manifest: Manifest) -> None:
        for name, given, found in (("dim", self._dim, manifest.dim), ("storage", self._storage, manifest.storage)):
            if given is not None and given != found:
                raise MiaError(f"{self._path}: {name}={given!r}, but the index has {found!r}; leave it out, or rebuild")
        check_spec_hash(str(self._path), manifest.spec_hash, self._spec_hash)
        if self._ranges is not None:
            raise MiaError(f"{self._path}: an index that exists has its ranges; leave them out")
        self._dim, self._spec_hash = manifest.dim, manifest.spec_hash
        self._storage = cast(Storage, manifest.storage)

    def _release(self) -> None:
        """Throw away what was not committed, and drop the lock."""
        if self._lock is None:
            return
        try:
            if self._stack is not None:
                self._stack.discard()
            # The manifest on the disk decides, wherever a commit was stopped.
            if (self._path / MANIFEST).exists():
                sweep(self._path, parse_manifest(self._path, read_manifest_bytes(self._path)))
            else:
                sweep(self._path, None)
                if self._made:
                    (self._path / LOCK).unlink()
                    self._path.rmdir()
        except (OSError, MiaError):
            pass  # the next writer sweeps; the error that led here must not be hidden
        finally:
            unlock_file(self._lock)
            self._lock = None

    def _checked(self, ids: Sequence[str], vectors: np.ndarray, sessions: Sequence[str], metadata: Metadata) -> _Chunks:
        self._check_usable()
        chunks = check_chunks(ids, vectors, sessions, None, cast(int, self._dim))
        if self._storage == "float16":
            check_float16(chunks.vectors, "vectors")
        return _Chunks(chunks.ids, chunks.vectors, chunks.sessions, metadata_lines(metadata, len(chunks.ids)))

    def _new_rows(self, count: int, rows: np.ndarray | None) -> np.ndarray:
        if rows is None:
            return np.arange(self._next_row, self._next_row + count)
        numbers = np.asarray(rows)
        if numbers.shape != (count,) or numbers.dtype.kind not in "iu":
            raise MiaError(f"rows {numbers.shape} {numbers.dtype}: expected ({count},) integers")
        if count and (numbers[0] < self._next_row or (np.diff(numbers) <= 0).any()):
            raise MiaError(f"rows: expected ascending numbers from {self._next_row} on")
        return numbers.astype(np.int64)

    def _append(self, chunks: _Chunks, rows: np.ndarray) -> None:
        if not chunks.ids:
            return
        if self._storage == "int8" and self._ranges is None:
            self._ranges = calibrate(chunks.vectors[:: 1 + len(rows) // _SAMPLE])
        stack = cast(SegmentStack, self._stack)
        stack.append(chunks.ids, chunks.sessions, rows, chunks.metadata, self._stored(chunks.vectors))
        self._row_of.update(zip(chunks.ids, rows.tolist(), strict=True))
        self._next_row, self._changed = int(rows[-1]) + 1, True

    def _stored(self, vectors: np.ndarray) -> Iterator[np.ndarray]:
        """Convert vectors a piece at a time."""
        tall = max(1, _WRITE_BYTES // (4 * vectors.shape[1]))
        for start in range(0, len(vectors), tall):
            piece = vectors[start : start + tall]
            if self._ranges is None:
                yield encode_storage(piece, cast(Storage, self._storage)).data
            else:
                codes, clipped = quantise(piece, self._ranges)
                self._clipped += clipped
                self._quantised += codes.size
                yield codes

    def _bury(self, names: list[str]) -> None:
        if names:
            cast(SegmentStack, self._stack).bury(np.array([self._row_of.pop(name) for name in names]))
            self._changed = True

    def _manifest(self, stack: SegmentStack) -> Manifest:
        """Describe the state to commit; writes what of it is not in segments."""
        generation = self._generation + 1
        if self._ranges is not None and self._ranges_file is None:
            self._ranges_file = write_file(self._path / f"ranges-{generation:08d}.bin", self._ranges.astype("<f4"))
        return Manifest(
            cast(int, self._dim),
            cast(str, self._storage),
            self._spec_hash,
            generation,
            self._next_row,
            self._ranges_file,
            stack.entries(),
        )

    @contextmanager
    def _changing(self) -> Iterator[SegmentStack]:
        """Let nothing be committed after a change that failed halfway."""
        try:
            yield cast(SegmentStack, self._stack)
        except BaseException as error:
            self._broken = True
            if isinstance(error, OSError):
                reason = (
                    f"{error.strerror or error}; the change was given up and the index is what its last commit left: "
                    "make room or give access, and run again"
                )
                raise OSError(error.errno or errno.EIO, reason, str(self._path)) from error
            raise

    def _check_usable(self) -> None:
        if self._lock is None:
            raise MiaError("IndexWriter is used outside its block: with IndexWriter(...) as writer: ...")
        if self._broken:
            raise RuntimeError(f"{self._path}: an earlier change failed halfway; leave the writer's block, start again")

    def _warn_of_clipping(self) -> None:
        if self._clipped:
            warnings.warn(
                f"{self._path}: {self._clipped} of {self._quantised} numbers lie outside the index's int8 ranges and "
                "were clipped; where that is many, rebuild from vectors that are alike, or store as float16",
                stacklevel=3,
            )
        self._clipped = self._quantised = 0
