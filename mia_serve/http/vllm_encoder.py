"""An encoder whose forwards a vLLM pooling server runs; texts become token ids here, by the one tokeniser of MiA."""

from __future__ import annotations

import asyncio
import base64
import binascii
import hashlib
import threading
from collections.abc import Coroutine, Iterator
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from mia_serve.core.encoder import Encoder
from mia_serve.core.errors import MiaError
from mia_serve.core.load import load_text_parts
from mia_serve.core.pooling import Sequence
from mia_serve.core.spec import EncoderSpec
from mia_serve.core.tokenise import TextTokeniser
from mia_serve.llm.endpoint import Endpoint, ServedModel, served_models
from mia_serve.llm.failures import LlmFailed

T = TypeVar("T")

# What one call of `embed_sequences` is given at once; vLLM itself decides what it computes together.
TOKENS_PER_BATCH = 65536
# Of one HTTP request. Enough to make its overhead small, few enough that several are on their way.
_REQUEST_TOKENS = 8192
_START = 'vllm serve MODEL --runner pooling --pooler-config \'{"pooling_type": "LAST"}\''


class _Prompt(NamedTuple):
    """Token ids whose last token is read, and where its vector goes."""

    ids: list[int]
    row: int
    views: list[str]


class VllmEncoder(Encoder):
    """Texts in, unit vectors out, like `Encoder`; but the model runs in vLLM, somewhere else.

    Only for models whose views are read at last tokens (decoders such as Qwen3-Embedding). A document, or a query
    alone, is one prompt. A query with its signature is one prompt a view: the part that ends in d_q, then the whole,
    whose beginning vLLM's prefix cache has by then, so that the second costs little more than the signature.

    Args:
        tokenizer: The model's transformers tokenizer.
        spec: Everything that changes a vector, beside the weights.
        url: Address of the server, with ``/v1``.
        served: The model as the server knows it.
        api_key: Key of the server; by default as `ChatClient`'s.
        concurrency: HTTP requests under way at most.
        timeout: Seconds for one attempt.
        max_retries: Further attempts after a connection error, timeout, 408, 409, 429 or 5xx, with growing pauses.

    Raises:
        MiaError: The model is not read at last tokens, or the server takes shorter texts than the spec allows.
    """

    pads = False

    def __init__(
        self,
        tokenizer: Any,
        spec: EncoderSpec,
        url: str,
        served: ServedModel,
        *,
        api_key: str | None = None,
        concurrency: int = 8,
        timeout: float = 120.0,
        max_retries: int = 3,
    ) -> None:
        _check_last_tokens(spec)
        longest = max(spec.max_query_tokens, spec.max_document_tokens)
        if served.max_model_len is not None and served.max_model_len < longest:
            raise MiaError(
                f"{url} serves {served.id!r} for {served.max_model_len} tokens, the encoder takes {longest}; "
                f"start it with --max-model-len {longest}, or lower max_query_tokens and max_document_tokens"
            )
        self.tokenizer, self.spec, self.served = tokenizer, spec, served
        self.device = torch.device("cpu")  # where its vectors come out
        self.text = TextTokeniser(tokenizer, spec)
        self.tokens_per_batch = TOKENS_PER_BATCH
        self.pad_id = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
        self._endpoint = Endpoint(url, api_key, timeout, max_retries)
        self._free = asyncio.Semaphore(concurrency)
        self._calls = _Loop()

    @classmethod
    def load(  # type: ignore[override]
        cls,
        name_or_path: str | Path,
        url: str,
        *,
        served: str | None = None,
        spec: dict[str, Any] | None = None,
        **options: Any,
    ) -> VllmEncoder:
        """Connect to a running server, and try it with one short text.

        Args:
            name_or_path: Where tokenizer and configuration are; see `Encoder.load`. Weights are not read.
            url: Address of the server, with ``/v1``.
            served: Name by which the server knows the model; by default its only one, or the one of that name.
            spec: Fields of `EncoderSpec` to use instead of what the folder says.
            **options: Keyword arguments of the class.

        Raises:
            MiaError: The folder is no encoder, or the server serves another model, or none that embeds.
            FileNotFoundError: There is no such folder, package or reachable hub id.
            LlmFailed: The server does not answer.
        """
        tokenizer, found = load_text_parts(str(name_or_path), spec or {})
        _check_last_tokens(found)
        calls = _Loop()
        try:
            models = calls.run(served_models(url, options.get("api_key")))
        finally:
            calls.close()
        encoder = cls(tokenizer, found, url, _pick(models, str(name_or_path), served, url), **options)
        try:
            encoder._try()
        except BaseException:
            encoder.close()
            raise
        return encoder

    @property
    def spec_hash(self) -> str:
        """Return 16 hex digits over the spec and the name of the served model; its weights are out of reach.

        Serve other weights under another name, or vectors of both are taken for one model's.
        """
        return hashlib.sha256(f"vllm {self.spec.hash} {self.served.id}".encode()).hexdigest()[:16]

    def save(self, path: str | Path) -> None:
        """Refuse: the weights are the server's."""
        raise MiaError("the weights of this encoder are vLLM's; copy the folder that it serves")

    def embed_sequences(self, sequences: Seq[Sequence]) -> list[dict[str, np.ndarray] | None]:
        """Return the views of token sequences, as `Encoder.embed_sequences`; blocks until all are there.

        Raises:
            LlmFailed: The server is out of reach, too slow, or refuses.
            RuntimeError: The model gave NaN.
        """
        found: list[dict[str, np.ndarray] | None] = [{} for _ in sequences]
        for prompts, vectors in self._calls.run(self._ask_all(list(_requests(sequences)))):
            for prompt, vector in zip(prompts, vectors, strict=True):
                views = found[prompt.row]
                assert views is not None
                views.update(dict.fromkeys(prompt.views, vector))
        return found

    def close(self) -> None:
        """Close the connections; do nothing a second time."""
        if self._calls.alive:
            self._calls.run(self._endpoint.api.close())
            self._calls.close()

    async def _ask_all(self, requests: list[list[_Prompt]]) -> list[tuple[list[_Prompt], np.ndarray]]:
        tasks = [asyncio.ensure_future(self._ask(prompts)) for prompts in requests]
        try:
            return list(zip(requests, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:  # where one failed the others' work is lost in any case
                task.cancel()

    async def _ask(self, prompts: list[_Prompt]) -> np.ndarray:
        """Return the (n, d) float32 unit vectors of one request's prompts."""
        async with self._free:
            reply = await self._endpoint.guard(
                self._endpoint.api.embeddings.create(
                    model=self.served.id, input=[prompt.ids for prompt in prompts], encoding_format="base64"
                )
            )
        vectors = self._vectors(reply, len(prompts))
        if not np.isfinite(vectors).all():
            raise RuntimeError(
                f"{self.served.id!r} gave NaN: its weights are broken, or too large for their number format; "
                "serve it with --dtype float32, or an earlier checkpoint"
            )
        vectors = vectors[:, : self.spec.truncate_dim]
        return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), 1e-12)

    def _vectors(self, reply: Any, count: int) -> np.ndarray:
        """Read the answer, which the client hands over as it came."""
        try:
            rows = sorted(reply.data, key=lambda row: row.index)
            read = [np.frombuffer(base64.b64decode(row.embedding, validate=True), "<f4") for row in rows]
        except (AttributeError, TypeError, ValueError, binascii.Error) as error:
            raise self._endpoint.foreign(f"{type(error).__name__} in its embeddings: {error}") from None
        if len(read) != count or any(len(vector) != self.spec.dim for vector in read):
            widths = sorted({len(vector) for vector in read})
            raise self._endpoint.foreign(
                f"{len(read)} vectors of width {widths} for {count} texts of a model that is {self.spec.dim} wide"
            )
        return np.stack(read)

    def _try(self) -> None:
        """Embed one short text, so that a wrong server is noticed at the start."""
        try:
            self.embed_sequences([self.text.document("a")])
        except LlmFailed as failure:
            if failure.status in (400, 404, 405, 422):
                raise MiaError(
                    f"{self._endpoint.base_url} does not embed with {self.served.id!r} ({failure}); "
                    f"start it as {_START}"
                ) from None
            raise


class _Loop:
    """An event loop in a thread of its own, for callers that have none."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="vllm-encoder", daemon=True)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._thread.is_alive()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine there, and wait for what it returns."""
        if not self.alive:
            work.close()
            raise RuntimeError("the encoder is closed")
        task = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return task.result()
        except BaseException:
            task.cancel()
            raise

    def close(self) -> None:
        """End the thread."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()


def _requests(sequences: Seq[Sequence]) -> Iterator[list[_Prompt]]:
    """Cut sequences into prompts, a sequence's shorter ones first and together, and those into requests."""
    request: list[_Prompt] = []
    tokens = 0
    for row, sequence in enumerate(sequences):
        views: dict[int, list[str]] = {}
        for view, (_, end) in sequence.spans.items():
            views.setdefault(end, []).append(view)
        prompts = [_Prompt(sequence.ids[:end], row, views[end]) for end in sorted(views)]
        length = sum(len(prompt.ids) for prompt in prompts)
        if request and tokens + length > _REQUEST_TOKENS:
            yield request
            request, tokens = [], 0
        request += prompts
        tokens += length
    if request:
        yield request


def _pick(models: list[ServedModel], name: str, served: str | None, url: str) -> ServedModel:
    """Return the served model that is meant."""
    known = {model.id: model for model in models}
    wanted = (served,) if served is not None else (name, Path(name).name, *(known if len(known) == 1 else ()))
    for choice in wanted:
        if choice in known:
            return known[choice]
    raise MiaError(f"{url} serves {', '.join(map(repr, known)) or 'nothing'}, not {wanted[0]!r}; say which is meant")


def _check_last_tokens(spec: EncoderSpec) -> None:
    if spec.pooling != "last":
        raise MiaError(
            f"{spec.base}: backend vllm is for models that are read at last tokens, and this one's pooling is "
            f"{spec.pooling!r}; take backend torch, or a decoder such as Qwen3-Embedding"
        )
