"""The commands of the index and of the vector cache: what they print, what they refuse, and what that leaves behind."""

from __future__ import annotations

import json
import resource
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mia_serve.cli import index_sources
from mia_serve.core import Encoder
from mia_serve.index import SessionIndex
from mia_serve.index.store import read_generation
from mia_serve.index.writer import IndexWriter
from tests.conftest import Ran, Run

WORDS = ["ferryman", "lamps", "quay", "ledger", "floor", "key", "clock", "village", "boat", "night"]
ROWS: list[dict[str, Any]] = [
    {
        "id": f"c{i:02}",
        "text": f"the {WORDS[i % 10]} of the {WORDS[i // 3]} and {i}",
        "session": f"s{i // 5}",
        "metadata": {"speaker": ("Ann", "Bob")[i % 2], "year": 2020 + i % 3},
    }
    for i in range(30)
]
QUERY = "the lamps of the quay"


@pytest.fixture
def mia(run: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Run:
    """Run a command with a vector cache of the test's own."""
    monkeypatch.setenv("MIA_CACHE", str(tmp_path / "cache"))
    return run


def write(path: Path, rows: Sequence[object]) -> Path:
    lines = (row if isinstance(row, str) else json.dumps(row, ensure_ascii=True) for row in rows)
    path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return path


@pytest.fixture
def chunks(tmp_path: Path) -> Path:
    return write(tmp_path / "chunks.jsonl", ROWS)


@pytest.fixture
def built(mia: Run, chunks: Path, tiny_bert: Path, tmp_path: Path) -> Path:
    out = tmp_path / "index"
    ran = mia("index", "build", "--chunks", chunks, "--encoder", tiny_bert, "-o", out)
    assert ran.code == 0, ran.err
    return out


@pytest.fixture(scope="module")
def encoder(tiny_bert: Path) -> Encoder:
    return Encoder.load(tiny_bert, device="cpu")


@pytest.fixture(scope="module")
def scores(encoder: Encoder) -> dict[str, float]:
    """Cosine of every chunk to the question, without an index."""
    vectors = encoder.encode_documents([row["text"] for row in ROWS]).astype(np.float64)
    query = encoder.encode_queries([QUERY])[0].astype(np.float64)
    return dict(zip([row["id"] for row in ROWS], (vectors @ query).tolist(), strict=True))


def best(scores: dict[str, float], k: int) -> list[str]:
    return sorted(scores, key=lambda name: (-scores[name], name))[:k]


def state(mia: Run, folder: Path) -> dict[str, Any]:
    return mia("index", "info", folder, "--verify", "--json", "-").record


def ids_of(ran: Ran) -> list[str]:
    return [hit["id"] for hit in ran.record["hits"]]


@contextmanager
def forwards() -> Iterator[list[int]]:
    """Collect the rows of every forward pass of any encoder's model."""
    rows: list[int] = []

    def count(module: torch.nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        if "input_ids" in kwargs and type(module).__name__ == "BertModel":
            rows.append(len(kwargs["input_ids"]))

    opened = Encoder.load

    def load(*args: Any, **options: Any) -> Encoder:
        encoder = opened(*args, **options)
        encoder.model.register_forward_pre_hook(count, with_kwargs=True)
        return encoder

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Encoder, "load", load)
        yield rows


@pytest.mark.parametrize("storage", ["float32", "float16", "int8"])
def test_an_index_of_a_file_is_built_in_blocks_and_searched(
    storage: str,
    mia: Run,
    chunks: Path,
    tiny_bert: Path,
    encoder: Encoder,
    scores: dict[str, float],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(index_sources, "BLOCK", 8)
    out = tmp_path / "index"
    made = mia(
        "index", "build", "--chunks", chunks, "--encoder", tiny_bert, "-o", out, "--storage", storage, "--json", "-"
    )
    assert made.record["texts"] == {"encoded": 30, "known": 0, "repeated": 0}
    assert "encoded 30 texts, 0 known" in made.err
    info = state(mia, out)
    expected = {"rows": 30, "dead_rows": 0, "sessions": 6, "dim": 32, "storage": storage, "generation": 1}
    assert info.items() >= expected.items() and info["spec_hash"] == encoder.spec_hash
    assert info["first_ids"] == ["c00", "c01", "c02"] and info["bytes"] > 30 * 32
    command = ("search", "--index", out, "--encoder", tiny_bert, "--query", QUERY)
    hits = mia(*command, "-k", 5, "--json", "-").record["hits"]
    tolerance = {"float32": 1e-5, "float16": 1e-3, "int8": 2e-2}[storage]
    assert [hit["score"] for hit in hits] == pytest.approx([scores[hit["id"]] for hit in hits], abs=tolerance)
    assert [hit["score"] for hit in hits] == pytest.approx([scores[name] for name in best(scores, 5)], abs=tolerance)
    if storage == "float32":
        assert [hit["id"] for hit in hits] == best(scores, 5)
    assert len(mia(*command, "-k", 1000, "--json", "-").record["hits"]) == 30  # more than there are
    row = next(row for row in ROWS if row["id"] == hits[0]["id"])
    assert (hits[0]["session_id"], hits[0]["metadata"]) == (row["session"], row["metadata"])
    assert f"{row['id']}  {row['session']}" in mia(*command).out


def test_a_second_build_and_a_second_embed_cost_no_forward_pass(
    mia: Run, chunks: Path, tiny_bert: Path, tmp_path: Path
) -> None:
    books = tmp_path / "books"
    books.mkdir()
    for name in ("north", "south"):
        text = "\n\n".join(f"The {name} ferry left quay {i}. Nobody asked why the boat had gone." for i in range(9))
        (books / f"{name}.txt").write_text(text, encoding="utf-8")
    build = ("mindscape", "build", books, "--encoder", tiny_bert, "--window", 4, "--chunk-tokens", 40)
    with forwards() as rows:
        first = mia(*build, "-o", tmp_path / "one", "--json", "-").record["texts"]
        assert sum(rows) == first["encoded"] > 10
        rows.clear()
        second = mia(*build, "-o", tmp_path / "two", "--json", "-").record["texts"]
        assert (second["encoded"], second["known"]) == (0, first["encoded"] + first["known"])
        index = ("index", "build", "--encoder", tiny_bert)
        assert "encoded 0 texts" in mia(*index, "--mindscape", tmp_path / "two", "-o", tmp_path / "i").out
        assert rows == []
        assert "encoded 30 texts, 0 known" in mia(*index, "--chunks", chunks, "-o", tmp_path / "j").out
        rows.clear()
        assert "encoded 0 texts, 30 known" in mia(*index, "--chunks", chunks, "-o", tmp_path / "j", "--replace").out
        assert rows == []
        mia(*index, "--chunks", chunks, "-o", tmp_path / "j", "--replace", "--cache", "off")
        assert sum(rows) == 30
        rows.clear()
        again = mia("embed", "--mindscape", tmp_path / "two", "--encoder", tiny_bert, "--json", "-").record
        assert again["texts"] == {"encoded": 0, "known": again["chunks"] + again["sessions"], "repeated": 0}
        measured = ("eval", "retrieval", "--series", "--limit", 4, "--n-boot", 10, "--base", tiny_bert, "--json", "-")
        runs = [mia(*measured).record for _ in range(2)]
        assert runs[0]["texts"]["encoded"] == runs[1]["texts"]["known"] > 4 and runs[1]["texts"]["encoded"] == 0
        assert runs[0]["rows"] == runs[1]["rows"]
    kept = read_vectors(tmp_path / "i")
    assert kept.keys() == {chunk_id for chunk_id in kept if chunk_id.startswith(("north:", "south:"))}
    found = mia("search", "--index", tmp_path / "i", "--encoder", tiny_bert, "--query", "Which quay?", "--json", "-",
                "--where", "book=south", "-k", 100)  # fmt: skip
    assert set(ids_of(found)) == {chunk_id for chunk_id in kept if chunk_id.startswith("south:")}


def read_vectors(folder: Path) -> dict[str, int]:
    index = SessionIndex.load(folder, device="cpu")
    return {name: row for row, name in enumerate(index.ids)}


def test_add_is_all_or_nothing_and_upsert_replaces(mia: Run, built: Path, tiny_bert: Path, tmp_path: Path) -> None:
    before = state(mia, built)
    more = [{"id": f"d{i}", "text": f"a boat {i}", "session": "s9"} for i in range(4)]
    moved = {"id": "c03", "text": "quite another text", "session": "s9"}
    mixed = write(tmp_path / "mixed.jsonl", [*more, moved])
    add = ("index", "add", built, "--encoder", tiny_bert, "--chunks", mixed)
    said = mia(*add).refusal
    assert f"{mixed}:5" in said and "'c03' is in the index already" in said and "--upsert" in said
    assert state(mia, built) == before
    record = mia(*add, "--upsert", "--json", "-").record
    assert (record["rows"], record["added"], record["replaced"]) == (34, 4, 1)
    info = state(mia, built)
    assert (info["rows"], info["dead_rows"], info["generation"]) == (34, 1, 2)
    search = ("search", "--index", built, "--encoder", tiny_bert, "--query", "quite another text", "--json", "-")
    assert ids_of(mia(*search))[0] == "c03"
    assert mia(*search, "--sessions").record["hits"][0]["best_chunk"] == "c03"
    # Rows keep their numbers: 30 to 34 went to the new ones, 3 is not given again.
    assert mia("index", "compact", built).code == 0
    info = state(mia, built)
    assert (info["rows"], info["dead_rows"], info["segments"]) == (34, 0, 1)
    assert ids_of(mia(*search))[0] == "c03"


def test_delete_by_argument_and_by_file(
    mia: Run, built: Path, tiny_bert: Path, tmp_path: Path, scores: dict[str, float]
) -> None:
    before = state(mia, built)
    for arguments, message in (
        (("c00", "nobody"), "'nobody'"),
        ((), "no ids to delete"),
        (("--ids-file", tmp_path / "none"), "no such file"),
        (("c00", "c00"), "'c00' is given twice"),
    ):
        ran = mia("index", "delete", built, *arguments)
        assert ran.code == 2 and message in ran.refusal, arguments
        assert state(mia, built) == before
    gone = best(scores, 3)
    listed = write(tmp_path / "ids.txt", [*gone[1:], ""])
    record = mia("index", "delete", built, gone[0], "--ids-file", listed, "--json", "-").record
    assert (record["rows"], record["deleted"]) == (27, 3)
    assert state(mia, built)["dead_rows"] == 3
    search = ("search", "--index", built, "--encoder", tiny_bert, "--query", QUERY, "-k", 30, "--json", "-")
    assert ids_of(mia(*search)) == best(scores, 30)[3:]
    # All of them: an index without rows is searched, and filled again.
    rest = write(tmp_path / "rest.txt", best(scores, 30)[3:])
    assert mia("index", "delete", built, "--ids-file", rest).code == 0
    assert mia(*search).record["hits"] == [] and mia(*search, "--sessions").record["hits"] == []
    assert mia(*search[:-2]).out == "no hits\n"
    assert mia("index", "compact", built).code == 0 and state(mia, built)["rows"] == 0
    assert mia("index", "add", built, "--encoder", tiny_bert, "--chunks", tmp_path / "chunks.jsonl").code == 0
    assert ids_of(mia(*search)) == best(scores, 30)


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth - 1):
        value = [value]
    return value


GOOD = {"id": "x", "text": "a boat", "session": "s"}
WRONG: dict[str, tuple[object, str]] = {
    "not JSON": ("{", "not JSON"),
    "not UTF-8 numbers": ('{"id": "y", "text": "t", "session": "s", "metadata": {"a": NaN}}', "not JSON"),
    "a list": ([1], "an object"),
    "no session": ({"id": "y", "text": "t"}, "'session' is missing"),
    "empty text": (GOOD | {"id": "y", "text": " "}, "'text' is ' '"),
    "a number": (GOOD | {"id": 3}, "'id' is 3"),
    "a typo": (GOOD | {"id": "y", "metdata": {}}, "unknown field 'metdata'"),
    "flat metadata": (GOOD | {"id": "y", "metadata": "a"}, "'metadata' is a str"),
    "a repeated id": (GOOD, "'x' stood in an earlier line"),
    "an infinite number": ('{"id": "y", "text": "t", "session": "s", "metadata": {"a": 1e999}}', "not JSON"),
    "half a character in metadata": (GOOD | {"id": "y", "metadata": {"a": "\ud800"}}, "'metadata': not JSON"),
    "deep metadata": (GOOD | {"id": "y", "metadata": {"a": nested(100)}}, "nested more than 100 deep"),
    "half a character": (GOOD | {"id": "y", "text": "a\ud800"}, "surrogate"),
}


def test_a_bad_line_is_named_and_nothing_is_written(mia: Run, tiny_bert: Path, tmp_path: Path, built: Path) -> None:
    before = state(mia, built)
    commands = (("build", "-o", tmp_path / "new"), ("add", built), ("build", "-o", built, "--replace"))
    for case, (line, message) in WRONG.items():
        file = write(tmp_path / "bad.jsonl", [GOOD, "", line])
        for command in commands:
            with forwards() as rows:
                ran = mia("index", *command, "--encoder", tiny_bert, "--chunks", file)
            assert ran.code == 2 and f"{file}:3" in ran.refusal and message in ran.refusal, case
            assert rows == []  # it was seen before anything was encoded
    assert not (tmp_path / "new").exists() and state(mia, built) == before


def test_what_is_not_an_index_or_a_source_is_refused(
    mia: Run, chunks: Path, built: Path, tiny_bert: Path, tiny_xlmr: Path, tmp_path: Path, encoder: Encoder
) -> None:
    before = state(mia, built)
    other = Encoder.load(tiny_xlmr, device="cpu")
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "thesis.txt").write_text("all of it")
    (tmp_path / "empty.jsonl").write_text("\n")
    given, none = ("--encoder", tiny_bert, "--chunks", chunks), tmp_path / "none"
    search = ("search", "--query", QUERY, "--encoder", tiny_bert)
    for arguments, message in (
        (("index", "build", *given, "-o", built), "--replace puts a new index there"),
        (("index", "build", *given, "-o", tmp_path / "papers"), "papers"),
        (("index", "build", *given, "-o", tmp_path / "papers", "--replace"), "papers"),
        (("index", "build", *given, "-o", chunks), "exists"),
        (("index", "build", *given, "-o", none / "below"), "does not exist"),
        (("index", "build", *given, "-o", none, "--json", chunks), "the file of --chunks"),
        (("index", "build", *given, "-o", none, "--cache", chunks), "is a file; give a folder, or off"),
        (("index", "build", "--encoder", tiny_bert, "-o", none), "--mindscape DIR or --chunks FILE"),
        (("index", "build", *given, "--mindscape", built, "-o", none), "--mindscape DIR or --chunks FILE"),
        (("index", "build", "--encoder", tiny_bert, "--mindscape", built, "-o", none), "mindscape"),
        (("index", "build", "--encoder", tiny_bert, "--chunks", none, "-o", none), "no such file"),
        (("index", "build", "--encoder", tiny_bert, "--chunks", tmp_path / "empty.jsonl", "-o", none), "no chunks"),
        (("index", "add", none, *given), "no index here"),
        (("index", "add", tmp_path / "papers", *given), "no index here"),
        (("index", "add", built, "--encoder", tiny_xlmr, "--chunks", chunks, "--upsert"), other.spec_hash),
        (("index", "delete", none, "c00"), "no index here"),
        (("index", "compact", none), "no index here"),
        (("index", "info", none), "no index here"),
        ((*search, "--index", none), "no index here"),
        ((*search[:3], "--index", built, "--encoder", tiny_xlmr), encoder.spec_hash),
        (search, "--mindscape DIR or --index DIR"),
        ((*search, "--index", built, "--mindscape", built), "--mindscape DIR or --index DIR"),
        ((*search[:3], "--index", built), "--index needs --encoder"),
        ((*search, "--index", built, "--alpha", 0.5), "--alpha has no meaning with --index"),
        ((*search, "--index", built, "--signature", "none"), "--signature has no meaning with --index"),
        ((*search, "--mindscape", built, "--sessions"), "--sessions has no meaning with --mindscape"),
        ((*search, "--index", built, "--pooling", "mean"), "add --sessions"),
        ((*search, "--index", built, "--where", "speaker"), "give KEY=VALUE"),
        ((*search[:1], "--query", " ", "--index", built), "--query is empty"),
        ((*search[:1], "--query", "lamp " * 300, *search[3:], "--index", built), "tokens"),
    ):
        ran = mia(*arguments)
        assert ran.code == 2 and message in ran.refusal, (arguments, ran)
    assert not none.exists() and state(mia, built) == before
    assert [item.name for item in (tmp_path / "papers").iterdir()] == ["thesis.txt"]


def test_sessions_with_every_pooling(mia: Run, built: Path, tiny_bert: Path, scores: dict[str, float]) -> None:
    by_session: dict[str, dict[str, float]] = {}
    for row in ROWS:
        by_session.setdefault(row["session"], {})[row["id"]] = scores[row["id"]]
    pooled: dict[str, Callable[[np.ndarray], float]] = {
        "max": lambda s: s.max(),
        "topk": lambda s: np.sort(s)[-3:].mean(),
        "mean": lambda s: s.mean(),
        "lme": lambda s: np.log(np.exp(10 * s).mean()) / 10,
    }
    command = ("search", "--index", built, "--encoder", tiny_bert, "--query", QUERY, "--sessions", "--json", "-")
    assert mia(*command).record["pooling"] == "max"
    for name in (*pooled, "early"):
        hits = mia(*command, "--pooling", name).record["hits"]
        assert len(hits) == 6 and [hit["rank"] for hit in hits] == list(range(1, 7))
        assert [hit["score"] for hit in hits] == sorted((hit["score"] for hit in hits), reverse=True)
        for hit in hits:
            own = by_session[hit["session_id"]]
            assert hit["best_chunk"] == best(own, 1)[0]
            assert hit["best_score"] == pytest.approx(max(own.values()), abs=1e-5)
            if name in pooled:
                assert hit["score"] == pytest.approx(pooled[name](np.array(list(own.values()))), abs=1e-5)


def test_where_knows_text_and_numbers(mia: Run, built: Path, tiny_bert: Path, scores: dict[str, float]) -> None:
    command = ("search", "--index", built, "--encoder", tiny_bert, "--query", QUERY, "-k", 30, "--json", "-")
    for options, keep in (
        (("speaker=Ann",), lambda m: m["speaker"] == "Ann"),
        (("year=2021",), lambda m: m["year"] == 2021),
        (("year=2021", "year=2022", "speaker=Bob"), lambda m: m["year"] > 2020 and m["speaker"] == "Bob"),
        (("speaker=Cid",), lambda m: False),
        (("place=quay",), lambda m: False),
    ):
        where = [part for option in options for part in ("--where", option)]
        expected = {row["id"]: scores[row["id"]] for row in ROWS if keep(row["metadata"])}
        assert ids_of(mia(*command, *where)) == best(expected, 30), options


@pytest.mark.parametrize("value", ["NaN", "1e999", "-Infinity", "[" * 100_000])
def test_where_takes_what_is_no_finite_number_for_text(
    mia: Run, built: Path, tiny_bert: Path, tmp_path: Path, value: str
) -> None:
    more = write(tmp_path / "more.jsonl", [GOOD | {"metadata": {"score": value}}])
    assert mia("index", "add", built, "--encoder", tiny_bert, "--chunks", more).code == 0
    search = ("search", "--index", built, "--encoder", tiny_bert, "--query", QUERY, "--json", "-")
    assert ids_of(mia(*search, "--where", f"score={value}")) == ["x"]


def test_ids_are_cut_at_line_ends_only(mia: Run, built: Path, tiny_bert: Path, tmp_path: Path) -> None:
    ids = ["a\u2028b", "a\x0bb", "a\x85b", "a\rb"]
    more = write(tmp_path / "more.jsonl", [GOOD | {"id": name} for name in ids])
    assert mia("index", "add", built, "--encoder", tiny_bert, "--chunks", more).code == 0
    listed = tmp_path / "ids.txt"
    listed.write_bytes("\r\n".join(ids[:2]).encode("utf-8-sig") + b"\n\n" + "\n".join(ids[2:]).encode())
    assert mia("index", "delete", built, "--ids-file", listed, "--json", "-").record["rows"] == 30


def test_json_never_goes_into_an_index(mia: Run, built: Path, chunks: Path, tiny_bert: Path, tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(built)
    before = state(mia, built)
    given = ("--encoder", tiny_bert, "--chunks", chunks)
    for command in (
        ("index", "info", built),
        ("index", "add", built, *given, "--upsert"),
        ("index", "delete", built, "c00"),
        ("index", "compact", built),
        ("index", "build", *given, "-o", built, "--replace"),
        ("search", "--index", built, "--encoder", tiny_bert, "--query", QUERY),
    ):
        for target in (built / "manifest.json", tmp_path / "link" / "new.json"):
            ran = mia(*command, "--json", target)
            assert ran.code == 2 and f"{str(target)!r} is in " in ran.refusal, command
        assert state(mia, built) == before
    new = tmp_path / "new"
    assert "give a file elsewhere" in mia("index", "build", *given, "-o", new, "--json", new).refusal
    assert not new.exists()


def test_a_damaged_index_is_rebuilt_in_its_place(mia: Run, built: Path, chunks: Path, tiny_bert: Path) -> None:
    (built / "manifest.json").write_text("{half")
    build = ("index", "build", "--chunks", chunks, "--encoder", tiny_bert, "-o", built)
    assert "rebuild the index" in mia(*build).refusal
    assert mia(*build, "--replace").code == 0
    assert state(mia, built)["rows"] == 30 and len(list(built.glob("segment-*"))) == 1


def test_info_counts_in_words(mia: Run, built: Path) -> None:
    assert mia("index", "delete", built, "c00").code == 0
    assert "29 chunks in 6 sessions" in mia("index", "info", built).out
    assert "\n1 dead row, " in mia("index", "info", built).out


def test_damage_is_named(mia: Run, built: Path, tiny_bert: Path) -> None:
    (vectors,) = built.glob("*/vectors.bin")
    content = vectors.read_bytes()
    search = ("search", "--index", built, "--encoder", tiny_bert, "--query", QUERY)
    vectors.write_bytes(content[:-4])
    for command in (("index", "info", built), search, ("index", "add", built, *search[3:5], "--chunks", "x")):
        assert mia(*command).code == 2
    assert "vectors.bin" in mia("index", "info", built).refusal
    vectors.write_bytes(bytes([content[0] ^ 1]) + content[1:])
    assert mia("index", "info", built).code == 0  # which does not read them
    assert "vectors.bin" in mia("index", "info", built, "--verify").refusal
    vectors.write_bytes(content)
    assert "checksums agree" in mia("index", "info", built, "--verify").out
    manifest = built / "manifest.json"
    manifest.write_text(manifest.read_text()[:-20])
    assert "manifest.json" in mia("index", "info", built).refusal


def test_a_second_writer_is_told_to_wait(mia: Run, built: Path, tiny_bert: Path, tmp_path: Path) -> None:
    more = write(tmp_path / "more.jsonl", [GOOD])
    with IndexWriter(built):
        for command in (("add", built, "--encoder", tiny_bert, "--chunks", more), ("delete", built, "c00")):
            said = mia("index", *command).refusal
            assert str(built) in said and "try again when it is done" in said
        assert state(mia, built)["rows"] == 30  # readers do not wait
    assert mia("index", "delete", built, "c00").code == 0


def test_a_full_disk_leaves_the_index_as_it_was(mia: Run, built: Path, tiny_bert: Path, tmp_path: Path) -> None:
    before = state(mia, built)
    more = write(tmp_path / "more.jsonl", [GOOD | {"id": f"x{i}", "text": f"a boat {i}"} for i in range(200)])
    command = ("index", "add", built, "--encoder", tiny_bert, "--chunks", more)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # bytes that any file may have
    try:
        ran = mia(*command)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert ran.code == 1 and "Traceback" not in ran.err
    warned, failed = ran.err.splitlines()
    assert "cannot be written" in warned and failed.startswith("error: ")  # the cache goes on, the index does not
    assert state(mia, built) == before and read_generation(built) == 1
    assert mia(*command).code == 0
    assert state(mia, built)["rows"] == 230
