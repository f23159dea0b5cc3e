"""Find and read the files of a benchmark; what is wrong in them is told with file and line."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from mia_serve.core import MiaError
from mia_serve.eval.datasets.base import DATA_SETTING
from mia_serve.eval.qa_data.base import QaSource

#: Kinds of files that hold one row a line (or a list of rows), in order of preference.
TABLES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".csv", ".parquet")
Row = tuple[str, dict[str, Any]]


def local_folder(source: QaSource, data_dir: str | Path | None) -> Path | None:
    """Return the folder with a benchmark's files: one of its names under the data folder, or ``data_dir`` itself.

    Args:
        source: The benchmark.
        data_dir: Folder with the benchmark's folder or its files; the one that MIA_DATA names where None.

    Returns:
        None where no such folder is there and none was given, so that the hub may be asked.

    Raises:
        FileNotFoundError: ``data_dir`` is no folder.
    """
    root = data_dir or os.environ.get(DATA_SETTING)
    if not root:
        return None
    if data_dir and not Path(root).is_dir():
        raise FileNotFoundError(f"{source.name}: {root} is no folder: give the one that holds {source.origin}")
    found = next((Path(root) / name for name in source.folders if (Path(root) / name).is_dir()), None)
    return found or (Path(root) if data_dir else None)


def missing(source: QaSource, what: str, folder: Path | None) -> FileNotFoundError:
    """Return the error of a benchmark whose files are not there."""
    data = os.environ.get(DATA_SETTING)
    looked = f"in {folder}" if folder else f"under {data}" if data else f"({DATA_SETTING} is not set)"
    return FileNotFoundError(
        f"{source.name}: no {what} {looked}: get {source.origin}, into {source.folders[0]}/ of the folder that "
        f"{DATA_SETTING} names, or name the folder with --data"
    )


def find_table(folder: Path, stem: str) -> list[Path]:
    """Return the file ``{stem}.jsonl`` (or another of ``TABLES``), or the shards ``{stem}-*.parquet``; maybe none."""
    whole = next((path for end in TABLES if (path := folder / f"{stem}{end}").is_file()), None)
    return [whole] if whole else sorted(folder.glob(f"{stem}-*.parquet"))


def hub_folder(source: QaSource, patterns: list[str], revision: str | None = None) -> Path:
    """Download files of the benchmark's data set and return the folder that holds them.

    Raises:
        FileNotFoundError: The hub cannot be reached and the files were never downloaded.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source.hub, repo_type="dataset", allow_patterns=patterns, revision=revision))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        folder = f"{source.folders[0]}/ of the folder that {DATA_SETTING} names"
        raise FileNotFoundError(
            f"{source.name}: no files in {folder}, and {source.hub} cannot be had from the hub "
            f"({type(error).__name__}); get {source.origin}, and name the folder with --data"
        ) from error


def read_text(path: Path) -> str:
    """Read a text as UTF-8, or as Windows-1252 where it is not, as old transcriptions are; line ends become LF."""
    raw = path.read_bytes()
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = raw.decode("cp1252", errors="replace")
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_rows(path: Path) -> Iterator[Row]:
    """Read the rows of a table, each with where it is: JSON lines, a JSON list, CSV with a header, or Parquet.

    Raises:
        MiaError: The file or a row is wrong; the message names file and line (or row).
    """
    if path.suffix == ".parquet":
        yield from _parquet_rows(path)
        return
    text = _decoded(path)
    kind = path.name.removesuffix(".gz")
    if kind.endswith(".csv"):
        yield from _csv_rows(path, text)
    elif kind.endswith(".json"):
        for i, row in enumerate(_as_list(_parsed(text, str(path)), path)):
            yield f"{path}, row {i}", _as_object(row, f"{path}, row {i}")
    else:
        # Not splitlines(): it also splits at characters that JSON strings may hold (U+2028, form feeds).
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                where = f"{path}, line {number}"
                yield where, _as_object(_parsed(line, where), where)


def read_json(path: Path) -> Any:
    """Read a JSON file.

    Raises:
        MiaError: It is not UTF-8, or not JSON.
    """
    return _parsed(_decoded(path), str(path))


def text_of(row: dict[str, Any], key: str, where: str, *, empty: bool = False) -> str:
    """Return a text of a row; unless ``empty`` it must hold more than white space.

    Raises:
        MiaError: It is missing, no text, or empty.
    """
    value = row.get(key)
    if not isinstance(value, str):
        got = "missing" if key not in row else f"{type(value).__name__}, not text"
        raise MiaError(f"{where}: {key!r} is {got}")
    if not empty and not value.strip():
        raise MiaError(f"{where}: {key!r} is empty")
    return value


def name_of(row: dict[str, Any], key: str, where: str) -> str:
    """Return a name of a row, which may be a whole number.

    Raises:
        MiaError: It is missing, empty, or neither text nor a whole number.
    """
    value = row.get(key)
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    return text_of(row, key, where).strip()


def texts_of(values: Iterable[Any], key: str, where: str) -> tuple[str, ...]:
    """Return the different texts of a list, without empty ones and in order.

    Raises:
        MiaError: It is no list of texts, or nothing is left.
    """
    if not isinstance(values, list | tuple) or not all(isinstance(value, str) for value in values):
        raise MiaError(f"{where}: {key!r} is no list of texts")
    kept = tuple(dict.fromkeys(value.strip() for value in values if value.strip()))
    if not kept:
        raise MiaError(f"{where}: {key!r} is empty: give at least one")
    return kept


def _decoded(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = error.object.count(b"\n", 0, error.start) + 1
        raise MiaError(f"{path}, line {line}: not UTF-8; convert the file") from None
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise MiaError(f"{path}: not a whole gzip file ({error})") from None


def _parsed(text: str, where: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        at = where if ", line" in where else f"{where}, line {error.lineno}"
        raise MiaError(f"{at}: not JSON ({error.msg})") from None
    except (ValueError, RecursionError) as error:  # too many digits, nested too deeply
        raise MiaError(f"{where}: not JSON ({error})") from None


def _as_list(value: Any, path: Path) -> list[Any]:
    if not isinstance(value, list):
        raise MiaError(f"{path}, line 1: {type(value).__name__}, not a list of rows")
    return value


def _as_object(value: Any, where: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise MiaError(f"{where}: {type(value).__name__}, not an object")
    return value


def _csv_rows(path: Path, text: str) -> Iterator[Row]:
    reader = csv.DictReader(io.StringIO(text, newline=""))
    last = 1
    try:
        for row in reader:
            where = f"{path}, line {last + 1}"
            last = reader.line_num
            if None in row or None in row.values():
                raise MiaError(f"{where}: not the {len(reader.fieldnames or ())} columns of the header")
            yield where, dict(row)
    except csv.Error as error:
        raise MiaError(f"{path}, line {reader.line_num}: not CSV ({error})") from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa
    import pyarrow.parquet as parquet

    number = 0
    try:
        # In small batches: NarrativeQA repeats the whole story in every row.
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=32):
            for row in batch.to_pylist():
                yield f"{path}, row {number}", row
                number += 1
    except pa.ArrowInvalid as error:
        raise MiaError(f"{path}: not a Parquet file that can be read ({' '.join(str(error).split())})") from None
