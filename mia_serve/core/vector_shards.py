"""The files of the vector cache: shards of vectors, found by the digests of their texts.

One encoder in one role has ``folder/<16 hex digits of its facts>/``:

    encoder.json    the facts, to be read by people
    NAME.shard      64 bytes of header, n keys, (n, d) little-endian float32: a text finds its row by the keys alone,
                    which lie together, so that no vector is read but those asked for

A key is the SHA-256 digest of a text and the CRC-32 of its vector (little-endian, started with the first four bytes of
the digest, so that the vector of another text does not fit). A vector that is read is held against its key.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import json
import mmap
import os
import secrets
import struct
import sys
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from mia_serve.core.errors import MiaError
from mia_serve.core.storage import sync

_SUFFIX = ".shard"
_HEADER = struct.Struct("<8sQ48x")  # magic, rows
_MAGIC = b"MIAVEC2\n"
_FAMILY = 6  # bytes of the magic that shards of every version have
_DIGEST, _KEY = 32, 36
_SMALL, _MANY = 4096, 32  # more than so many shards, each with fewer than so many rows, become one
_ABANDONED = 24 * 3600.0  # seconds after which a file written aside has lost its writer

_said: set[str] = set()  # caches and shards that this process has complained of


def text_digest(text: str) -> bytes:
    """Return the SHA-256 of a text's UTF-8 bytes, the same in every process, version and machine."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()  # what is no text the encoder will refuse


class _Shard(NamedTuple):
    """An open shard; its file may go meanwhile, the mapping stays."""

    path: Path
    mapped: mmap.mmap
    keys: np.ndarray  # (n, 36) uint8
    vectors: np.ndarray  # (n, d) float32

    def give_back(self) -> None:
        """Unmap what was read: until then it counts as this process's memory."""
        self.mapped.madvise(mmap.MADV_DONTNEED)


class VectorCache:
    """Vectors of one encoder in one role.

    A shard is written aside, flushed and renamed, so that a killed writer leaves whole shards only. Shards are never
    changed and are named by what they hold: writers do not disturb each other, nor readers. Many small ones are merged.

    A cache saves work and is never needed for it: where the folder cannot be written (read-only, disk full) or a shard
    or a vector in it is damaged, that is said once on stderr, and the texts are encoded again. Shards of another
    version are left alone.

    Args:
        folder: Where the caches of all encoders lie; made if it is missing.
        facts: All that decides a vector, ``dim`` among it; what ``vector_cache.encoder_facts`` returns.

    Raises:
        MiaError: ``folder`` is a file.
    """

    def __init__(self, folder: str | Path, facts: dict[str, Any]) -> None:
        root = Path(folder)
        if root.exists() and not root.is_dir():
            raise MiaError(f"cache {str(root)!r} is a file; give a folder")
        key = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
        self.folder = root / key
        self.dim = int(facts["dim"])
        self._writes = True
        self._shards: dict[str, _Shard | None] = {}  # None: cannot be read
        self._listed = -1  # modification time of the folder, in ns, when its shards were listed
        self._directory = _Directory([])
        with self._tolerant():
            self.folder.mkdir(parents=True, exist_ok=True)
            note = self.folder / "encoder.json"
            if not note.is_file():
                self._place(note, [json.dumps(facts, indent=2).encode() + b"\n"])

    def fill(self, texts: Sequence[str], out: np.ndarray) -> list[int]:
        """Copy what is known into ``out`` (n, d) and return the positions of the texts that are not.

        Raises:
            MiaError: A text is given twice.
        """
        if len(set(texts)) != len(texts):
            raise MiaError("texts to look up repeat; give each once")
        self._refresh()
        missing = np.ones(len(texts), bool)
        digests = _digests(texts)
        damaged: dict[int, Path] = {}
        for copy in itertools.count():  # of a text: one that is damaged may have been encoded again since
            left = np.flatnonzero(missing)
            found = self._directory.find(digests[left], copy)
            if not found:
                break
            for shard, places, rows in found:
                places = left[places]
                same = (shard.keys[rows, :_DIGEST] == digests[places]).all(axis=1)
                places, rows = places[same], rows[same]
                vectors = shard.vectors[rows]
                whole = (_keys(digests[places], vectors) == shard.keys[rows]).all(axis=1)
                out[places[whole]] = vectors[whole]
                missing[places[whole]] = False
                damaged.update(dict.fromkeys(places[~whole].tolist(), shard.path))
                shard.give_back()
        for path in sorted({str(path) for place, path in damaged.items() if missing[place]} - _said):
            _said.add(path)
            print(f"{path}: damaged vectors; their texts are encoded again", file=sys.stderr)
        return np.flatnonzero(missing).tolist()

    def add(self, texts: Sequence[str], vectors: np.ndarray) -> None:
        """Append one shard: n different texts and their (n, d) vectors."""
        if not len(texts) or not self._writes:
            return
        with self._tolerant():
            self._write(_keys(_digests(texts), vectors), [vectors])
            self._merge()

    def _refresh(self) -> None:
        """Open the shards that have come, by other processes too, and forget those that have gone."""
        while True:
            try:
                changed = self.folder.stat().st_mtime_ns
                if changed == self._listed:
                    return
                names = sorted(entry.name for entry in os.scandir(self.folder) if entry.name.endswith(_SUFFIX))
            except OSError:
                return  # there is no such folder, which was said when it could not be made
            # A change in the same tick as the listing would leave no trace, so a young folder is listed again.
            self._listed = changed if time.time_ns() - changed > 1_000_000_000 else -1
            if names == list(self._shards):
                return
            try:
                self._shards = {n: self._shards[n] if n in self._shards else self._open(n) for n in names}
            except FileNotFoundError:
                continue  # merged between listing and opening: another shard has its texts
            self._directory = _Directory([shard for shard in self._shards.values() if shard is not None])
            return

    def _open(self, name: str) -> _Shard | None:
        path = self.folder / name
        try:
            with path.open("rb") as file:
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            magic, rows = _HEADER.unpack_from(mapped)
            if magic[:_FAMILY] == _MAGIC[:_FAMILY] and magic != _MAGIC:
                return None
            start = _HEADER.size + rows * _KEY
            if magic != _MAGIC or len(mapped) != start + rows * self.dim * 4:
                raise ValueError("other records, or not all of them")
        except FileNotFoundError:
            raise
        except (OSError, ValueError, struct.error):
            print(f"{path}: not a shard that can be read; its texts are encoded again", file=sys.stderr)
            return None
        keys = np.frombuffer(mapped, np.uint8, rows * _KEY, _HEADER.size).reshape(rows, _KEY)
        vectors = np.frombuffer(mapped, "<f4", rows * self.dim, start).reshape(rows, self.dim)
        return _Shard(path, mapped, keys, vectors)

    def _write(self, keys: np.ndarray, parts: Iterable[np.ndarray]) -> str:
        """Write a shard of (n, 36) keys, and their vectors in parts of (m, d); return its name."""
        head = keys.tobytes()
        name = hashlib.sha256(head).hexdigest()[:24] + _SUFFIX
        vectors = (np.ascontiguousarray(part, "<f4").tobytes() for part in parts)
        self._place(self.folder / name, itertools.chain((_HEADER.pack(_MAGIC, len(keys)), head), vectors))
        return name

    def _merge(self) -> None:
        """Make one shard of many small ones, so that commands that encode a few texts each do not slow each other."""
        self._refresh()
        small = {n: s for n, s in self._shards.items() if s is not None and len(s.keys) < _SMALL}
        if len(small) <= _MANY:
            return
        keys = np.concatenate([shard.keys for shard in small.values()])
        computed = np.concatenate([_keys(shard.keys[:, :_DIGEST], shard.vectors) for shard in small.values()])
        whole = np.flatnonzero((computed == keys).all(axis=1))
        kept = np.zeros(len(keys), bool)
        # Two writers may have had the same text.
        kept[whole[np.unique(_prefixes(keys[whole]), return_index=True)[1]]] = True
        ends = np.cumsum([len(shard.keys) for shard in small.values()])
        rows = np.split(kept, ends[:-1])
        made = self._write(keys[kept], (s.vectors[r] for s, r in zip(small.values(), rows, strict=True)))
        for name in small.keys() - {made}:
            (self.folder / name).unlink(missing_ok=True)
        for left in self.folder.glob(".*.tmp"):
            with contextlib.suppress(FileNotFoundError):  # its writer was alive and has renamed it meanwhile
                if time.time() - left.stat().st_mtime > _ABANDONED:
                    left.unlink()

    def _place(self, path: Path, content: Iterable[bytes]) -> None:
        aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
        try:
            with aside.open("wb") as file:
                file.writelines(content)
                file.flush()
                os.fsync(file.fileno())
            os.replace(aside, path)
            sync(self.folder)
        finally:
            with contextlib.suppress(OSError):
                aside.unlink()

    @contextlib.contextmanager
    def _tolerant(self) -> Iterator[None]:
        """Go on without writing where the folder cannot be written."""
        try:
            yield
        except OSError as error:
            self._writes = False
            root = str(self.folder.parent)
            if root not in _said:
                _said.add(root)
                print(
                    f"cache {root!r} cannot be written ({error.strerror or error}); vectors are not kept",
                    file=sys.stderr,
                )


class _Directory:
    """Where the shards have which text: 16 bytes a text, sorted by the first 8 bytes of the digests."""

    def __init__(self, shards: Sequence[_Shard]) -> None:
        self.shards = shards
        sizes = [len(shard.keys) for shard in shards]
        prefixes = np.concatenate([_prefixes(shard.keys) for shard in shards] or [np.empty(0, np.uint64)])
        order = np.argsort(prefixes, kind="stable")
        self.prefixes = prefixes[order]
        self.owner = np.repeat(np.arange(len(shards), dtype=np.int32), sizes)[order]
        self.row = np.concatenate([np.arange(n, dtype=np.int32) for n in sizes] or [np.empty(0, np.int32)])[order]
        for shard in shards:
            shard.give_back()

    def find(self, digests: np.ndarray, copy: int = 0) -> list[tuple[_Shard, np.ndarray, np.ndarray]]:
        """Return shards with places in ``digests`` (n, 32) and the rows there, equal in the first 8 bytes.

        Of several such rows the one of number ``copy`` is meant, from 0; a digest with fewer is left out.
        """
        wanted = _prefixes(digests)
        at = np.searchsorted(self.prefixes, wanted) + copy
        places = np.flatnonzero(at < len(self.prefixes))
        places = places[self.prefixes[at[places]] == wanted[places]]
        owner, row = self.owner[at[places]], self.row[at[places]]
        return [(self.shards[n], places[owner == n], row[owner == n]) for n in np.unique(owner).tolist()]


def _digests(texts: Sequence[str]) -> np.ndarray:
    return np.frombuffer(b"".join(map(text_digest, texts)), np.uint8).reshape(-1, _DIGEST)


def _keys(digests: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """Return the keys (n, 36) of texts with these digests (n, 32) and vectors (n, d)."""
    starts = np.ascontiguousarray(digests[:, :4]).view("<u4")[:, 0].tolist()
    rows = zip(np.ascontiguousarray(vectors, "<f4"), starts, strict=True)
    sums = np.fromiter((zlib.crc32(row, start) for row, start in rows), "<u4", len(starts))
    return np.concatenate([digests, sums[:, None].view(np.uint8)], axis=1)


def _prefixes(keys: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(keys[:, :8]).view(np.uint64)[:, 0]
