"""Opening and writing model folders: sentence-transformers, plain transformers, adapters, and our own."""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, cast

import torch
from safetensors import SafetensorError
from tokenizers.processors import TemplateProcessing
from transformers import AutoConfig, AutoModel, AutoTokenizer
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_FOR_MASKED_LM_MAPPING_NAMES

from mia_serve.core.errors import MiaError
from mia_serve.core.names import full_name, resolve_folder
from mia_serve.core.spec import SPEC_FILE, EncoderSpec, Pooling
from mia_serve.core.storage import write_aside
from mia_serve.core.template import (
    MIA_INSTRUCTION,
    Template,
    bidirectional_template,
    causal_template,
    instruction_prefix,
)

NODE_TOKEN = "<|repo_name|>"  # the node token of the published MiA-Emb checkpoints
# Rotary models could take far more; these are what an encoder is served with unless its folder or the caller says.
CAUSAL_QUERY_TOKENS, CAUSAL_DOCUMENT_TOKENS = 4096, 2048


@dataclass(frozen=True)
class FolderFacts:
    """What a model folder says of itself, before any weight is read."""

    folder: Path
    kind: Literal["mia", "sentence-transformers", "adapter", "plain"]
    backbone: Path
    prompts: dict[str, str] = field(default_factory=dict)
    pooling: Pooling | None = None
    max_tokens: int | None = None


def folder_facts(folder: Path) -> FolderFacts:
    """Read what a model folder says of itself.

    Raises:
        MiaError: It holds no model, or modules that are not Transformer + Pooling + Normalize.
    """
    has = lambda name: (folder / name).is_file()  # noqa: E731
    if has(SPEC_FILE):
        return FolderFacts(folder, "mia", folder)
    if has("modules.json"):
        return _sentence_transformers_facts(folder)
    if has("adapter_config.json"):
        return FolderFacts(folder, "adapter", folder)
    if has("config.json"):
        return FolderFacts(folder, "plain", folder)
    raise MiaError(f"{folder}: no {SPEC_FILE}, modules.json, adapter_config.json or config.json; not a model folder")


def _sentence_transformers_facts(folder: Path) -> FolderFacts:
    modules = _json(folder / "modules.json")
    kinds = [m["type"].rsplit(".", 1)[-1] for m in modules]
    extra = [k for k in kinds if k not in ("Transformer", "Pooling", "Normalize")]
    if extra or kinds[:1] != ["Transformer"]:
        raise MiaError(
            f"{folder}: module {(extra or kinds)[0]!r} of modules.json; allowed: Transformer, Pooling, Normalize"
        )
    backbone = folder / modules[0]["path"]
    pooling: Pooling | None = None
    if "Pooling" in kinds:
        raw = _json(folder / modules[kinds.index("Pooling")]["path"] / "config.json")
        modes = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
        old = [
            k.removeprefix("pooling_mode_").removesuffix("_tokens").removesuffix("_token")
            for k, v in raw.items()
            if k.startswith("pooling_mode_") and v is True
        ]
        asked = [raw["pooling_mode"]] if "pooling_mode" in raw else old
        if len(asked) != 1 or asked[0] not in modes:
            raise MiaError(f"{folder}: pooling {'+'.join(map(str, asked))!r}; allowed: mean, cls, lasttoken")
        pooling = cast(Pooling, modes[asked[0]])
    sizes = _json(backbone / "sentence_bert_config.json")
    limit = sizes.get("max_seq_length") or _json(backbone / "tokenizer_config.json").get("model_max_length")
    prompts = _json(folder / "config_sentence_transformers.json").get("prompts") or {}
    return FolderFacts(folder, "sentence-transformers", backbone, prompts, pooling, limit)


def load_parts(
    name: str, dtype: torch.dtype, overrides: dict[str, Any], base: str | None = None, quantization: Any = None
) -> tuple[torch.nn.Module, Any, EncoderSpec]:
    """Return backbone, tokenizer and spec of a model; see :meth:`Encoder.load`.

    With ``base`` an adapter is put on that model instead of the one that its folder names; ``quantization`` is a
    transformers quantization config for the backbone.
    """
    facts = folder_facts(resolve_folder(full_name(name)))
    if _is_adapter(facts):
        model, _, _ = load_parts(base or adapter_base(facts), dtype, {}, None, quantization)
        model = _with_adapter(model, facts.backbone)
    else:
        model = _backbone(facts.backbone, dtype, quantization)
    return model, *load_text_parts(name, overrides, base)


def load_text_parts(name: str, overrides: dict[str, Any], base: str | None = None) -> tuple[Any, EncoderSpec]:
    """Return tokenizer and spec of a model without a look at its weights, which need not be there; see `load_parts`."""
    tokenizer, spec, _ = _text_parts(name, overrides, base)
    return tokenizer, spec


def _text_parts(name: str, overrides: dict[str, Any], base: str | None) -> tuple[Any, EncoderSpec, Any]:
    """Return tokenizer, spec and transformers config (that of the base under an adapter)."""
    name = full_name(name)
    facts = folder_facts(resolve_folder(name))
    if _is_adapter(facts):
        base_tokenizer, base_spec, config = _text_parts(base or adapter_base(facts), {}, None)
        own = (facts.backbone / "tokenizer_config.json").is_file() or (facts.backbone / "tokenizer.json").is_file()
        tokenizer = _tokenizer(facts.backbone) if own else base_tokenizer
    else:
        config, tokenizer, base_spec = _config(facts.backbone), _tokenizer(facts.backbone), None
    if facts.kind == "mia":
        spec = EncoderSpec.from_json((facts.folder / SPEC_FILE).read_text("utf-8"), str(facts.folder / SPEC_FILE))
    elif facts.kind == "adapter" and base_spec is not None:
        spec = _adapter_spec(base_spec)
    else:
        spec = _inferred_spec(name, facts, config, tokenizer)
    try:
        spec = spec.with_changes(**overrides)
    except TypeError as error:
        raise MiaError(f"{name}: {error}; the fields are those of EncoderSpec") from error
    _check_fits(name, spec, config)
    return tokenizer, spec, config


def _is_adapter(facts: FolderFacts) -> bool:
    return (facts.backbone / "adapter_config.json").is_file()


def _config(folder: Path) -> Any:
    try:
        return AutoConfig.from_pretrained(folder)
    except (ValueError, OSError) as error:
        raise MiaError(f"{folder}: its model cannot be read ({error}); get or save the folder again") from error


def _backbone(folder: Path, dtype: torch.dtype, quantization: Any = None) -> Any:
    """Open a transformers model, and refuse one whose weights are not all there: random ones would take their place."""
    try:
        model, loading = AutoModel.from_pretrained(
            folder, dtype=dtype, quantization_config=quantization, output_loading_info=True
        )
    except (ValueError, OSError, RuntimeError, SafetensorError) as error:
        raise MiaError(f"{folder}: its model cannot be read ({error}); get or save the folder again") from error
    # The pooler of a BERT is not used here, and many folders lack it.
    missing = sorted(key for key in loading["missing_keys"] if "pooler" not in key)
    if missing:
        raise MiaError(
            f"{folder}: its weights lack {missing[0]!r} ({len(missing)} in all); get or save the folder again"
        )
    return model


def _tokenizer(folder: Path) -> Any:
    try:
        return AutoTokenizer.from_pretrained(folder)
    except ValueError as error:
        raise MiaError(f"{folder}: its tokenizer cannot be read ({error}); get or save the folder again") from error


def _with_adapter(model: torch.nn.Module, folder: Path) -> Any:
    """Put an adapter-only folder on its base."""
    try:
        from peft import PeftModel
    except ImportError as error:
        raise MiaError(f"{folder}: an adapter needs the package peft: pip install peft") from error
    task = _json(folder / "adapter_config.json").get("task_type")
    if task not in (None, "FEATURE_EXTRACTION"):
        raise MiaError(f"{folder}: an adapter for task_type {task!r}; allowed: FEATURE_EXTRACTION, or none given")
    try:
        adapted = PeftModel.from_pretrained(cast(Any, model), str(folder))
        # Only this tells which weights were found; peft itself would go on with the bare base.
        found = adapted.load_adapter(str(folder), "default")
    except (ValueError, RuntimeError, SafetensorError) as error:
        said = " ".join(str(error).split())[:300]  # torch names every tensor of every layer, each on a line
        raise MiaError(
            f"{folder}: its adapter cannot be read ({said}); put it on the base it was made for, or get it again"
        ) from error
    for what, keys in (("lacks", found.missing_keys), ("has no place here for", found.unexpected_keys)):
        if keys:
            raise MiaError(
                f"{folder}: its adapter {what} {keys[0]!r} ({len(keys)} in all); it was made for another model"
            )
    return adapted


def _check_fits(name: str, spec: EncoderSpec, config: Any) -> None:
    """Refuse a spec that the model cannot serve, rather than fail inside it at the first long text."""
    if spec.dim != config.hidden_size:
        raise MiaError(f"{name}: dim is {spec.dim} but the model is {config.hidden_size} wide; give that")
    if getattr(config, "max_position_embeddings", None):
        limit = positions(config)
        for field_name in ("max_query_tokens", "max_document_tokens"):
            if getattr(spec, field_name) > limit:
                raise MiaError(
                    f"{name}: {field_name} is {getattr(spec, field_name)}; the model's positions reach {limit}"
                )


def adapter_base(facts: FolderFacts) -> str:
    """Return the name of the model under an adapter-only folder; a relative one counts from that folder."""
    config = _json(facts.backbone / "adapter_config.json")
    if not isinstance(config, dict):
        raise MiaError(f"{facts.backbone / 'adapter_config.json'} holds no JSON object; get or save the folder again")
    base = config.get("base_model_name_or_path")
    if (
        facts.kind == "mia"
    ):  # adapter_config.json holds what other libraries can open; the spec holds what was asked for
        named = _json(facts.folder / SPEC_FILE).get("base")
        if named and (str(named).startswith("package:") or not base):
            base = named
    if not base:
        raise MiaError(f"{facts.backbone}: adapter_config.json names no base_model_name_or_path; add it")
    beside = facts.backbone / str(base)
    if any(path.is_dir() and path.samefile(facts.backbone) for path in (beside, Path(str(base)))):
        raise MiaError(f"{facts.backbone}: its base_model_name_or_path {base!r} is the adapter itself; name its base")
    return str(beside) if str(base).startswith(".") and beside.is_dir() else str(base)


def _adapter_spec(base: EncoderSpec) -> EncoderSpec:
    """Return the spec of a bare adapter: its base's, and on a Qwen3-Embedding base the layout of MiA-Emb.

    The published MiA-Emb and SFT-Emb folders hold an adapter and no prompts; they were trained with that instruction.
    """
    if base.template.node_token is None:
        return base
    template = causal_template(base.template.end[0], base.template.node_token, instruction_prefix(MIA_INSTRUCTION))
    return base.with_changes(template=template)


def _inferred_spec(name: str, facts: FolderFacts, config: Any, tokenizer: Any) -> EncoderSpec:
    causal = is_causal(config.model_type)
    pooling: Pooling = facts.pooling or ("last" if causal else "mean")
    start, end = _special_tokens(tokenizer)
    prompts = {"query_prefix": facts.prompts.get("query", ""), "document_prefix": facts.prompts.get("document", "")}
    if pooling == "last":
        vocabulary = tokenizer.get_vocab()
        if len(end) != 1:
            end = (_terminal(tokenizer, vocabulary, name),)
        node = NODE_TOKEN if NODE_TOKEN in vocabulary else None
        template: Template = causal_template(end[0], node, **prompts)
        template = Template.from_dict({**template.__dict__, "start": start})
    else:
        template = bidirectional_template(start, end, **prompts)
    limit = positions(config)
    query = min(limit, CAUSAL_QUERY_TOKENS)
    document = min(limit, facts.max_tokens or (CAUSAL_DOCUMENT_TOKENS if causal else limit))
    return EncoderSpec(
        base=name,
        pooling=pooling,
        template=template,
        dim=config.hidden_size,
        max_query_tokens=query,
        max_document_tokens=document,
    )


def is_causal(model_type: str) -> bool:
    """Return whether an architecture is a decoder (Qwen3, Llama …) rather than a BERT-like encoder."""
    return model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES and model_type not in MODEL_FOR_MASKED_LM_MAPPING_NAMES


def positions(config: Any) -> int:
    """Return how many tokens the positions of a model reach (RoBERTa-like tables start after the padding id)."""
    limit = int(getattr(config, "max_position_embeddings", None) or 512)
    if config.model_type in ("roberta", "xlm-roberta", "camembert", "mpnet"):
        limit -= int(config.pad_token_id) + 1
    return limit


def _special_tokens(tokenizer: Any) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the special tokens that the tokenizer itself puts before and after a text."""
    text = tokenizer("a", add_special_tokens=False)["input_ids"]
    ids = tokenizer("a")["input_ids"]
    for i in range(len(ids) - len(text) + 1):
        if ids[i : i + len(text)] == text:
            before, after = ids[:i], ids[i + len(text) :]
            names = tokenizer.convert_ids_to_tokens
            return tuple(names(before)), tuple(names(after))
    raise MiaError(f"{tokenizer.name_or_path}: the tokenizer changes a text when it adds special tokens")


def _terminal(tokenizer: Any, vocabulary: dict[str, int], name: str) -> str:
    """Return the terminal token of a causal tokenizer that appends none itself.

    Qwen3-Embedding's own tokenizer appends ``<|endoftext|>``, which is its padding token, not its ``eos_token``.
    """
    for token in ("<|endoftext|>", tokenizer.eos_token, tokenizer.pad_token):
        if token is not None and token in vocabulary:
            return str(token)
    raise MiaError(f"{name}: the tokenizer has no end-of-text, eos or padding token to pool at; add one")


def save_parts(model: torch.nn.Module, tokenizer: Any, spec: EncoderSpec, path: Path) -> None:
    """Write an encoder folder, whole or not at all.

    The folder opens in :meth:`Encoder.load` and, for documents and query-only queries, in
    ``SentenceTransformer(path)`` with equal vectors; a ``truncate_dim`` of the spec must be passed to it as well, for
    it stores none. A model with adapters is written as the adapter alone.
    """
    with write_aside(path) as aside:
        model.save_pretrained(str(aside))  # type: ignore[operator]
        if (aside / "adapter_config.json").is_file():
            _name_base(aside / "adapter_config.json", spec)
            (aside / "README.md").unlink(missing_ok=True)  # peft's empty card; ours is written by the trainer
        _with_special_tokens(tokenizer, spec.template).save_pretrained(str(aside))
        write_folder_facts(spec, aside)
        for file in aside.glob("*.safetensors"):
            file.chmod(0o644)  # written 0600, which a server under another user could not read


def _with_special_tokens(tokenizer: Any, template: Template) -> Any:
    """Return a tokenizer that puts the template's special tokens around a text, as others expect of the one they open.

    Most do already; that of a plain decoder (Qwen2.5, Llama) lacks the end that its vector is read at.
    """
    if _special_tokens(tokenizer) == (template.start, template.end):
        return tokenizer
    names = [*template.start, *template.end]
    ids = list(zip(names, tokenizer.convert_tokens_to_ids(names), strict=True))
    own = copy.deepcopy(tokenizer)
    own.backend_tokenizer.post_processor = TemplateProcessing(
        single=[*template.start, "$A", *template.end], special_tokens=ids
    )
    return own


def write_folder_facts(spec: EncoderSpec, folder: Path) -> None:
    """Write ``mia_encoder.json`` and what sentence-transformers reads: modules, pooling, prompts, length."""
    (folder / SPEC_FILE).write_text(spec.to_json(), "utf-8")
    kinds = (("", "Transformer"), ("1_Pooling", "Pooling"), ("2_Normalize", "Normalize"))
    modules = [
        {"idx": i, "name": str(i), "path": p, "type": f"sentence_transformers.models.{k}"}
        for i, (p, k) in enumerate(kinds)
    ]
    _write(folder / "modules.json", modules)
    for sub, _ in kinds[1:]:
        (folder / sub).mkdir(exist_ok=True)
    mode = {"mean": "mean_tokens", "cls": "cls_token", "last": "lasttoken"}[spec.pooling]
    pooling = {f"pooling_mode_{m}": m == mode for m in ("cls_token", "mean_tokens", "max_tokens", "lasttoken")}
    _write(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": spec.dim, **pooling})
    # The older form of this file keeps a causal base with a chat template in text mode: strings are not wrapped.
    _write(folder / "sentence_bert_config.json", {"max_seq_length": spec.max_document_tokens, "do_lower_case": False})
    prompts = {"query": spec.template.query_prefix, "document": spec.template.document_prefix}
    _write(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts, "default_prompt_name": None, "similarity_fn_name": spec.similarity},
    )


def _name_base(file: Path, spec: EncoderSpec) -> None:
    """Write into adapter_config.json a base that peft and sentence-transformers can find from anywhere."""
    raw = _json(file)
    try:
        folder = resolve_folder(spec.base) if spec.base.startswith("package:") or Path(spec.base).is_dir() else None
    except FileNotFoundError:
        folder = None
    raw["base_model_name_or_path"] = str(folder.resolve()) if folder else spec.base
    _write(file, raw)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text("utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise MiaError(f"{file} is not valid JSON ({error}); get or save the folder again") from error


def _write(file: Path, value: Any) -> None:
    file.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", "utf-8")
