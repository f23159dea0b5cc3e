"""Read the configuration of a server: YAML in, a checked `ServerConfig` or a one-line error out."""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from mia_serve.core.errors import MiaError

#: Names of this machine that no other can use.
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")

Role = Literal["read", "write", "admin"]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class EncoderConfig(_Section):
    """An encoder.

    Attributes:
        model: Folder, hub id or ``package:module/path``.
        name: What `/v1/embeddings` may call it beside ``e1`` or ``e2``; the last part of ``model`` by default.
        device: ``auto``, ``cpu``, ``cuda``, ``cuda:1`` …
        dtype: ``auto``, ``float32``, ``bfloat16``, ``float16``.
        backend: ``torch`` in this process, or ``vllm``, a pooling server at ``url`` (``model`` is its tokenizer).
        url: Of that server.
    """

    model: str = Field(min_length=1)
    name: str | None = Field(default=None, min_length=1)
    device: str = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    backend: Literal["torch", "vllm"] = "torch"
    url: str | None = None

    @property
    def served_name(self) -> str:
        """Name that clients may use."""
        return self.name or self.model.rstrip("/").rpartition("/")[2]


class LlmConfig(_Section):
    """A language model: somewhere behind the OpenAI protocol (``url``), or a vLLM of ours (``serve``).

    Attributes:
        url: Address of the endpoint, with ``/v1``.
        serve: Folder of a model that the server starts vLLM with.
        model: Name under which it is served; by default the only one there.
        api_key_env: Environment variable that holds the key of the endpoint.
        python: Interpreter that has vLLM; for ``serve``.
        device: Where vLLM runs; for ``serve``.
        arguments: Further arguments of ``vllm serve``.
        concurrency: Calls under way at a time.
        context_tokens: Context of the model, where the endpoint does not say.
        timeout_s: Seconds that a call may take.
        startup_s: Seconds until vLLM must answer.
    """

    url: str | None = None
    serve: str | None = None
    model: str | None = None
    api_key_env: str | None = None
    python: str | None = None
    device: Literal["auto", "cpu", "cuda"] = "auto"
    arguments: tuple[str, ...] = Field(default=(), strict=False)
    concurrency: int = Field(default=32, ge=1)
    context_tokens: int | None = Field(default=None, ge=256)
    timeout_s: float = Field(default=120.0, gt=0)
    startup_s: float = Field(default=600.0, gt=0)


class Limits(_Section):
    """What one request, and all of them together, may ask for.

    Attributes:
        body_mb: Size of a request's body, MiB.
        inputs: Texts in one request.
        tokens_per_text: Tokens of one text, at most the model's own limit; None: that.
        waiting_tokens: Tokens that may wait for an encoder before requests are sent away with 429.
        requests_per_minute: Of one key (of one address where there are no keys); None: no limit.
        tokens_per_minute: Encoded for one key.
    """

    body_mb: float = Field(default=8.0, gt=0, le=1024)
    inputs: int = Field(default=2048, ge=1)
    tokens_per_text: int | None = Field(default=None, ge=1)
    waiting_tokens: int = Field(default=1_000_000, ge=1)
    requests_per_minute: int | None = Field(default=None, ge=1)
    tokens_per_minute: int | None = Field(default=None, ge=1)


class QueueConfig(_Section):
    """How an encoder's work is batched.

    Attributes:
        tokens_per_batch: Padded tokens of one forward; None: what the device is used to.
    """

    tokens_per_batch: int | None = Field(default=None, ge=1)


class CollectionsConfig(_Section):
    """How collections are kept and searched.

    Attributes:
        window: Chunks in a session of a book.
        chunk_tokens: Tokens of a chunk, where the server cuts a text.
        chunk_overlap: Tokens that neighbours share.
        summarizer: What writes the summaries of sessions.
        k0: E1's best chunks whose sessions form the pool.
        k_sum: Sessions in a signature.
        alpha: Weight of the signature-aware view; None: the encoder's own.
        prior: What the signature's sessions add to their chunks' scores, at most.
    """

    window: int = Field(default=20, ge=1)
    chunk_tokens: int = Field(default=256, ge=8)
    chunk_overlap: int = Field(default=0, ge=0)
    summarizer: Literal["extractive", "keywords", "llm"] = "extractive"
    k0: int = Field(default=50, ge=1)
    k_sum: int | Literal["auto"] = 5
    alpha: float | None = Field(default=None, ge=0, le=1)
    prior: float = Field(default=0.0, ge=0)

    @field_validator("k_sum", mode="before")
    @classmethod
    def _check_size(cls, given: object) -> object:
        if given != "auto" and (type(given) is not int or given < 1):
            raise ValueError("give a whole number from 1, or auto")
        return given


class LogConfig(_Section):
    """What is logged.

    Attributes:
        level: The least grave lines that are.
        text: Whether messages of our own bugs, which may quote a client's text, are.
    """

    level: Literal["debug", "info", "warning", "error"] = "info"
    text: bool = False


class ServerConfig(_Section):
    """Everything that a server is told; the YAML of ``mia-serve serve`` has the same names.

    Attributes:
        e1: The query-only encoder.
        e2: The signature-aware one; None: E1 alone.
        host: Address to listen on.
        port: 0: a free one.
        data: Folder of the collections.
        llm: The language model of `/v1/answer`; None: it is off.
        keys: File of `mia-serve key`; None: everyone may do everything.
        open: Listen beyond this machine although there are no keys.
        limits: Of requests.
        queue: Batching.
        collections: How they are kept and searched.
        log: What is logged.
        drain_s: Seconds that requests under way have when the server is told to stop.
    """

    e1: EncoderConfig
    e2: EncoderConfig | None = None
    host: str = "127.0.0.1"
    port: int = Field(default=8100, ge=0, le=65535)
    data: Path = Field(default=Path("data/collections"), strict=False)
    llm: LlmConfig | None = None
    keys: Path | None = Field(default=None, strict=False)
    open: bool = False
    limits: Limits = Limits()
    queue: QueueConfig = QueueConfig()
    collections: CollectionsConfig = CollectionsConfig()
    log: LogConfig = LogConfig()
    drain_s: float = Field(default=20.0, ge=0)

    @classmethod
    def load(cls, path: str | Path, host: str | None = None, port: int | None = None) -> ServerConfig:
        """Read a YAML file; relative paths in it are resolved from its folder.

        Args:
            path: The file.
            host: In place of the file's.
            port: In place of the file's.

        Raises:
            FileNotFoundError: There is no such file.
            MiaError: It is not what a configuration looks like; the message names the key.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"{path}: no such file; give a configuration such as recipes/serve_cpu.yaml")
        try:
            raw = yaml.load(path.read_text(encoding="utf-8"), _UniqueKeys)
        except MiaError as error:
            raise MiaError(f"{path}: {error}") from None
        except (yaml.YAMLError, UnicodeDecodeError) as error:
            raise MiaError(f"{path} is not valid YAML: {' '.join(str(error).split())}") from error
        if not isinstance(raw, dict):
            raise MiaError(f"{path} holds {type(raw).__name__}; it must hold keys such as e1, port and data")
        raw |= {name: value for name, value in (("host", host), ("port", port)) if value is not None}
        try:
            config = cls.model_validate(raw)
        except ValidationError as error:
            raise MiaError(f"{path}: {_first_problem(error)}") from None
        config = _resolved(config, path.absolute().parent)
        _check(config, str(path))
        return config


class _UniqueKeys(yaml.SafeLoader):
    """Refuse a key given twice, of which PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        keys = [self.construct_object(key, deep=True) for key, _ in node.value]
        for at, key in enumerate(keys):
            if key in keys[:at]:
                raise MiaError(f"line {node.value[at][0].start_mark.line + 1}: {key!r} is given twice; keep one")
        return super().construct_mapping(node, deep)


def _first_problem(error: ValidationError) -> str:
    first = error.errors()[0]
    place = [str(part) for part in first["loc"]]
    where = ".".join(place)
    if first["type"] == "extra_forbidden":
        allowed = list(_section_at(place[:-1]).model_fields)
        near = difflib.get_close_matches(place[-1], allowed, 1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        return f"unknown key {where!r}; {hint}allowed: {', '.join(allowed)}"
    if first["type"] == "missing":
        return f"{where} is missing; it is required"
    message = first["msg"].removeprefix("Value error, ")
    return f"{where} is {first['input']!r}: {message[0].lower()}{message[1:]}"


def _section_at(place: list[str]) -> type[BaseModel]:
    section: type[BaseModel] = ServerConfig
    for name in place:
        kinds = section.model_fields[name].annotation
        found = [kind for kind in (kinds, *get_args(kinds)) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        section = found[0]
    return section


def _resolved(config: ServerConfig, folder: Path) -> ServerConfig:
    """Return the configuration with relative paths taken from its folder; hub ids and package names stay."""

    def model(name: str) -> str:
        inside = folder / name
        return str(inside) if name.startswith(".") or (not name.startswith("package:") and inside.is_dir()) else name

    changes: dict[str, Any] = {"data": folder / config.data.expanduser()}
    if config.keys is not None:
        changes["keys"] = folder / config.keys.expanduser()
    for role, encoder in (("e1", config.e1), ("e2", config.e2)):
        if encoder is not None:
            # The name is that of the file, before its path is written out.
            named = {"model": model(encoder.model), "name": encoder.served_name}
            changes[role] = encoder.model_copy(update=named)
    if config.llm is not None and config.llm.serve is not None:
        changes["llm"] = config.llm.model_copy(update={"serve": model(config.llm.serve)})
    return config.model_copy(update=changes)


def _check(config: ServerConfig, source: str) -> None:
    """Refuse what no single field can tell.

    Raises:
        MiaError: Keys do not go together.
    """
    for problem in _conflicts(config):
        raise MiaError(f"{source}: {problem}")


def _conflicts(config: ServerConfig) -> Iterator[str]:
    if config.keys is None and not config.open and config.host not in LOCAL_HOSTS:
        yield (
            f"host {config.host!r} is open to other machines, but there are no keys; make some with `mia-serve key "
            "add` and name their file under keys, or say `open: true`"
        )
    for role, encoder in (("e1", config.e1), ("e2", config.e2)):
        if encoder is not None and (encoder.backend == "vllm") != (encoder.url is not None):
            yield f"{role}: backend vllm needs url, the address of its server, and backend torch has none"
    if config.llm is not None and (config.llm.url is None) == (config.llm.serve is None):
        yield "llm: give either url, an OpenAI-compatible endpoint, or serve, a model's folder"
    if config.llm is not None and config.llm.url is not None and not config.llm.url.startswith(("http://", "https://")):
        yield f"llm.url is {config.llm.url!r}: give an address that begins with http:// or https://"
    variable = config.llm.api_key_env if config.llm is not None else None
    if variable is not None and not os.environ.get(variable):
        yield f"llm.api_key_env names the environment variable {variable!r}, which is not set: set it, or leave it out"
    if config.collections.summarizer == "llm" and config.llm is None:
        yield "collections.summarizer is 'llm', but there is no llm; give one, or 'extractive'"
    if config.collections.chunk_overlap >= config.collections.chunk_tokens:
        yield "collections.chunk_overlap must be smaller than collections.chunk_tokens"
