"""What the commands share: where output goes, which encoder is meant, and the checks made before anything loads."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from mia_serve.core.errors import MiaError

if TYPE_CHECKING:
    from mia_serve.core import Encoder
    from mia_serve.core.cached_encoder import CachedEncoder

#: Optional file of a checkpoint: the base and E1 that it was trained with, defaults of --base and --e1.
RUN_FILE = "mia_run.json"
K_SUM = 5  # sessions in a signature, the papers'
NONE = "none"


class Data(StrEnum):
    """Benchmarks that ``--data`` knows."""

    saltmarsh = "saltmarsh"
    fairytaleqa = "fairytaleqa"
    qmsum = "qmsum"
    locomo = "locomo"


class Backend(StrEnum):
    """Index backends."""

    auto = "auto"
    torch = "torch"
    faiss = "faiss"


class Candidates(StrEnum):
    """What E2 ranks."""

    all = "all"
    e1_topk = "e1_topk"


class Cover(StrEnum):
    """What a session covers in the signature's objective."""

    member = "member"
    semantic = "semantic"


class CoverWeight(StrEnum):
    """How the pool's chunks count in the signature's objective."""

    e1_score = "e1_score"
    uniform = "uniform"


class Mode(StrEnum):
    """Ways to choose a signature."""

    coverage = "coverage"
    first_k = "first_k"
    global_summary = "global_summary"


class AnswerModes(StrEnum):
    """What a prompt holds beside the question."""

    auto = "auto"
    chunks = "chunks"
    sig = "chunks+sig"
    evi = "chunks+evi"
    both = "chunks+sig+evi"


class SignatureUpdates(StrEnum):
    """How an agent's signature changes."""

    select = "select"
    rewrite = "rewrite"
    submodular = "submodular"


JsonOption = Annotated[
    str | None, typer.Option("--json", metavar="FILE|-", help="Write JSON to FILE; - prints JSON alone on stdout.")
]
DeviceOption = Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, …")]
MindscapeOption = Annotated[Path, typer.Option("--mindscape", metavar="DIR", help="Folder of `mindscape build`.")]
CacheOption = Annotated[
    str | None,
    typer.Option(
        "--cache",
        metavar="DIR|off",
        help="Keep vectors here and encode only new texts; $MIA_CACHE (a folder, or off) or ~/.cache/mia/vectors.",
    ),
]
BackendOption = Annotated[Backend, typer.Option(help="Index backend.")]
AlphaOption = Annotated[
    float | None, typer.Option(min=0.0, max=1.0, help="Weight of the signature-aware view; the encoder's by default.")
]
K0Option = Annotated[int, typer.Option("--k0", min=1, help="E1's best chunks whose sessions form the pool.")]
PriorOption = Annotated[
    float, typer.Option("--prior", min=0.0, help="What the signature's sessions add to their chunks' scores, at most.")
]
CoverOption = Annotated[Cover, typer.Option(help="A session covers its members, or all by cosine (the paper's).")]
CoverWeightOption = Annotated[
    CoverWeight, typer.Option("--cover-weight", help="Chunks count by E1's score, or all alike (the paper's).")
]
KSumOption = Annotated[
    int | None, typer.Option("--k-sum", min=1, help="Sessions in a signature; as E2 was trained by default, else 5.")
]


class RunDefaults(NamedTuple):
    """What a checkpoint was trained with, where it says so."""

    base: str | None = None
    e1: str | None = None
    k_sum: int = K_SUM
    signature_mode: str = Mode.coverage.value


def write_file(path: str | Path, content: str | bytes) -> None:
    """Write a file whole or not at all; text as UTF-8."""
    target = Path(path)
    handle, aside = tempfile.mkstemp(dir=target.parent, prefix=f".{target.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
        # mkstemp makes the file private; give it the mode that the user's umask asks for.
        mask = os.umask(0)
        os.umask(mask)
        os.chmod(aside, 0o666 & ~mask)
        os.replace(aside, target)
    except BaseException:
        Path(aside).unlink(missing_ok=True)
        raise


def emit(text: str, record: Any, json_to: str | None) -> None:
    """Print text for people, and JSON where it was asked for.

    With ``-`` the JSON is all that stdout gets and the text goes to stderr.

    Args:
        text: Table or lines, newline at the end.
        record: JSON-ready value.
        json_to: The ``--json`` option.
    """
    typer.echo(text, nl=False, err=json_to == "-")
    if json_to is None:
        return
    lines = json.dumps(record, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
    if json_to == "-":
        typer.echo(lines, nl=False)
    else:
        write_file(json_to, lines)


def check_output(path: str | Path | None, what: str, *, overwrite: bool = True) -> None:
    """Refuse an output path that could not be written, before any work is done.

    Raises:
        MiaError: It is a folder where a file is meant, or exists and must not be replaced.
        FileNotFoundError: Its folder does not exist.
    """
    if path is None or path == "-":
        return
    target = Path(path)
    if not target.absolute().parent.is_dir():
        raise FileNotFoundError(f"{what} {str(path)!r}: its folder does not exist; create it first")
    if overwrite and target.is_dir():
        raise MiaError(f"{what} {str(path)!r} is a folder; give a file")
    if not overwrite and target.exists():
        raise MiaError(f"{what} {str(path)!r} exists; give a new path or remove it first")


def check_apart(outputs: Mapping[str, str | Path | None], inputs: Mapping[str, str | Path | None]) -> None:
    """Refuse outputs that would overwrite an input or one another, however their paths are written.

    Args:
        outputs: Option -> path to be written; None and ``-`` are left out.
        inputs: Option -> path that is read; None is left out.

    Raises:
        MiaError: Two are the same file.
    """
    place = {os.path.realpath(path): what for what, path in inputs.items() if path is not None}
    for what, path in outputs.items():
        if path is None or str(path) == "-":
            continue
        other = place.setdefault(os.path.realpath(path), what)
        if other != what:
            raise MiaError(f"{what} {str(path)!r} is the file of {other}; give another, so that neither is lost")


def check_outside(outputs: Mapping[str, str | Path | None], folders: Mapping[str, Path | None]) -> None:
    """Refuse outputs in folders whose files belong together, an index or a mindscape, however their paths are written.

    Args:
        outputs: Option -> path to be written; None and ``-`` are left out.
        folders: Option -> folder that is read or written; None is left out.

    Raises:
        MiaError: An output is such a folder or lies in one.
    """
    for what, path in outputs.items():
        if path is None or str(path) == "-":
            continue
        # A link is replaced where it lies, not where it points to: both places count.
        places = [Path(os.path.realpath(path)), Path(os.path.realpath(Path(path).parent), Path(path).name)]
        for other, folder in folders.items():
            if folder is not None and any(place.is_relative_to(os.path.realpath(folder)) for place in places):
                raise MiaError(
                    f"{what} {str(path)!r} is in {other} {str(folder)!r}; give a file elsewhere, so that nothing of it "
                    "is overwritten"
                )


def check_query(text: str) -> None:
    """Refuse a query without text.

    Raises:
        ValueError: The query is empty.
    """
    if not text.strip():
        raise ValueError("--query is empty; give the question to search for")


def check_folder(path: Path, what: str) -> None:
    """Refuse a folder that is not there.

    Raises:
        FileNotFoundError: Nothing is there, or not a folder.
    """
    if not path.is_dir():
        raise FileNotFoundError(f"{what} {str(path)!r}: no such folder")


def progress() -> Callable[[str], None]:
    """Return a printer of progress lines: on stderr for people, silent in logs and pipes."""
    if not sys.stderr.isatty():
        return lambda line: None
    return lambda line: typer.echo(line, err=True)


def notice(line: str) -> None:
    """Print a line on stderr that logs need too."""
    typer.echo(line, err=True)


def load_encoder(name: str, device: str) -> Encoder:
    """Open an encoder."""
    from transformers.utils import logging as transformers_logging

    from mia_serve.core import Encoder

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    return Encoder.load(name, device=device)


def cache_folder(option: str | None) -> Path | None:
    """Return the folder that ``--cache`` names, the default one where it names none, or None for ``off``.

    Raises:
        MiaError: It is a file.
    """
    from mia_serve.core.vector_cache import default_cache

    if option is not None and option.lower() == "off":
        return None
    folder = default_cache() if option is None else Path(option).expanduser()
    if folder is not None and folder.exists() and not folder.is_dir():
        what = "--cache" if option is not None else "MIA_CACHE"
        raise MiaError(f"{what} {str(folder)!r} is a file; give a folder, or off")
    return folder


class Encoders:
    """Opens the encoders of a command, each once, all with the same cache.

    Args:
        device: The ``--device`` option.
        cache: What `cache_folder` returns.

    Attributes:
        report: Counts of the texts that all of them encoded.
    """

    def __init__(self, device: str, cache: Path | None) -> None:
        from mia_serve.core.vector_cache import CacheReport

        self.device, self.cache, self.report = device, cache, CacheReport()
        self._opened: dict[str, CachedEncoder] = {}

    def open(self, name: str) -> CachedEncoder:
        """Open an encoder by folder, hub id or ``package:module/path``."""
        if name not in self._opened:
            encoder = load_encoder(name, self.device)
            from mia_serve.core.cached_encoder import CachedEncoder

            self._opened[name] = CachedEncoder(encoder, self.cache, self.report)
        return self._opened[name]


def run_defaults(checkpoint: str | None) -> RunDefaults:
    """Read what a checkpoint's ``mia_run.json`` says of the run: base, E1, kind of signature, sessions in one.

    Where the file is missing, the base is that of the encoder's spec.

    Relative paths are resolved from the checkpoint's folder.

    Raises:
        ValueError: The file is not valid JSON or holds something else than names.
    """
    if checkpoint is None or not Path(checkpoint).is_dir():
        return RunDefaults()
    folder = Path(checkpoint)
    path = folder / RUN_FILE
    if not path.is_file():
        spec = folder / "mia_encoder.json"
        record = read_object(spec) if spec.is_file() else {}
        return RunDefaults(_resolve(record.get("base"), folder, spec))
    record = read_object(path)
    allowed = RunDefaults._fields
    unknown = sorted(set(record) - set(allowed))
    if unknown:
        raise ValueError(f"{path}: unknown key {unknown[0]!r}; allowed: {', '.join(allowed)}")
    k_sum = record.get("k_sum", K_SUM)
    if not isinstance(k_sum, int) or k_sum < 1:
        raise ValueError(f"{path}: k_sum is {k_sum!r}; it must be an integer >= 1")
    mode = record.get("signature_mode", Mode.coverage.value)
    if mode not in list(Mode):
        raise ValueError(f"{path}: signature_mode is {mode!r}; it must be one of {', '.join(Mode)}")
    base, e1 = (_resolve(record.get(role), folder, path) for role in ("base", "e1"))
    return RunDefaults(base, e1, k_sum, mode)


def chosen(option: str | None, default: str | None) -> str | None:
    """Return the option, else the default; ``none`` drops either."""
    name = default if option is None else option
    return None if name is None or name.lower() == NONE else name


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON file that holds an object.

    Raises:
        ValueError: It is not valid JSON, or holds something else.
    """
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); write it again or remove it") from error
    if not isinstance(record, dict):
        raise ValueError(f"{path} holds a {type(record).__name__}; it must hold an object")
    return record


def _resolve(name: object, folder: Path, source: Path) -> str | None:
    if name is None:
        return None
    if not isinstance(name, str) or not name:
        raise ValueError(f"{source}: {name!r} is no encoder; give a folder, a hub id or package:module/path")
    if name.startswith("package:") or Path(name).is_absolute():
        return name
    inside = folder / name
    # A hub id looks like a relative path too: only what exists, or plainly is a path, is taken for one.
    return os.path.normpath(inside) if inside.is_dir() or name.startswith(".") else name
