"""Merging: an adapter and its base become one encoder folder, checked against the adapter before it is put in place."""

from __future__ import annotations

import gc
import json
import logging
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
import yaml
from torch import Tensor

from mia_serve.core import Encoder, EncoderSpec, MiaError, Sequence, TextTokeniser, embed_batch, pad_sequences
from mia_serve.core.load import adapter_base, folder_facts, load_parts
from mia_serve.core.names import resolve_folder
from mia_serve.core.storage import write_aside
from mia_train.card import PEFT_NOTE
from mia_train.finish import RECIPE_FILE, RUN_FILE

Dtype = Literal["auto", "float32", "bfloat16"]
#: The lowest cosine between adapter and merged encoder must exceed this, by the format the weights are saved in.
LEAST_COSINE = {"float32": 0.9999, "bfloat16": 0.999}

_LONG = (
    "The harbour office kept two ledgers. The first was for the owners, and in it every crate that came off the "
    "Petrel was weighed, named and paid for. The second lay under the third floorboard from the window; it held the "
    "nights on which no lamp was lit at the end of the quay, and beside each night a name. "
) * 3
_CHINESE = "潮水退去以后，他在码头的木板下找到了第二本账，里面写着没有点灯的那些夜晚。"
_SUMMARIES = ["The ferryman counts the lamps and finds one missing.", _CHINESE, _LONG]
_QUERIES = ("key", "Who hid the second ledger, and on which night was it found?", "谁藏了那本账？", _LONG)
_DOCUMENTS = ("lamp", "Nobody would say where the boat had gone; 17 crates, №4, café.", _CHINESE * 8, _LONG)


class MergeFailed(RuntimeError):
    """The merged encoder does not give the adapter's vectors; nothing was written."""


@dataclass(frozen=True)
class MergeReport:
    """What a merge did and what its check measured.

    Attributes:
        adapter: The adapter's folder, as given.
        base: The model that it was merged into.
        output: The merged folder.
        dtype: Format the weights are saved in: ``float32`` or ``bfloat16``.
        cosine_min: Lowest cosine between a vector of the adapter and of the merged folder, both computed in float32.
        max_abs_diff: Largest difference between two of their values.
        least_cosine: What ``cosine_min`` had to exceed.
        probes: Vectors compared.
        size_bytes: Size of the merged folder's files.
        notes: What a user should know, one line each.
    """

    adapter: str
    base: str
    output: str
    dtype: str
    cosine_min: float
    max_abs_diff: float
    least_cosine: float
    probes: int
    size_bytes: int
    notes: tuple[str, ...] = ()


class _Probes(NamedTuple):
    """Token sequences of the probe texts, and the (R, d) float32 vectors of all their views."""

    sequences: list[Sequence]
    vectors: Tensor


def merge_adapter(
    adapter: str | Path, output: str | Path, base: str | None = None, dtype: Dtype = "auto"
) -> MergeReport:
    """Merge an adapter into its base and write a whole encoder folder, or nothing.

    The weights are merged in float32. The folder is written beside its place, opened again from there, and every view
    (documents; queries with and without a signature) of a fixed set of texts is compared with the adapter's.

    Args:
        adapter: Adapter folder or checkpoint of ours, a bare PEFT folder, or a hub id of one.
        output: Folder to write; it must not exist yet.
        base: Model to merge into; None: the one that the adapter names.
        dtype: Format of the saved weights; ``auto`` is bfloat16 where the base is stored so, otherwise float32.

    Returns:
        What was measured.

    Raises:
        MiaError: There is no adapter, it does not belong on the base, or the output exists.
        FileNotFoundError: The adapter or its base is not there.
        MergeFailed: The merged encoder differs from the adapter by more than the format explains.
    """
    output = Path(output)
    if output.exists():
        raise MiaError(f"{output} exists; give a new folder or remove it first")
    source, base_name = _find(str(adapter), base)
    stored = _stored_dtype(base_name)
    saved = dtype if dtype != "auto" else "bfloat16" if stored == "bfloat16" else "float32"
    notes = _notes(source, base, saved, stored)
    with write_aside(output) as aside:
        before = _write_merged(str(adapter), base, base_name, saved, aside)
        gc.collect()  # adapter and base: what is opened again next may be as large
        cosine, difference = _compare(str(adapter), before, aside, saved)
        report = MergeReport(
            adapter=str(adapter),
            base=base_name,
            output=str(output),
            dtype=saved,
            cosine_min=cosine,
            max_abs_diff=difference,
            least_cosine=LEAST_COSINE[saved],
            probes=len(before.vectors),
            size_bytes=sum(file.stat().st_size for file in aside.rglob("*") if file.is_file()),
            notes=notes,
        )
        _carry_run(source, aside, output)
        _write_card(source, aside, report)
    return report


def _find(adapter: str, base: str | None) -> tuple[Path, str]:
    """Return the adapter's folder and the name of the base, or say why they cannot be merged."""
    facts = folder_facts(resolve_folder(adapter))
    if not (facts.backbone / "adapter_config.json").is_file():
        raise MiaError(f"{adapter} holds no adapter: it is already a whole encoder, and there is nothing to merge")
    name = base or adapter_base(facts)
    try:
        under = folder_facts(resolve_folder(name)).backbone
    except FileNotFoundError as error:
        raise FileNotFoundError(f"the base of {adapter} is not here: {error}; name another place with --base") from None
    if (under / "adapter_config.json").is_file():
        raise MiaError(f"{name}, the base of {adapter}, is itself an adapter; merge that first and give it as --base")
    if "quantization_config" in _config(under):
        raise MiaError(
            f"{name}, the base of {adapter}, is stored quantised, and merging would round the adapter away; "
            "give the model that it was quantised from as --base"
        )
    # A relative folder counts from here, and the merged encoder may be read from elsewhere.
    local = not name.startswith("package:") and Path(name).is_dir()
    return facts.folder, str(Path(name).resolve()) if local else name


def _stored_dtype(base: str) -> str | None:
    config = _config(folder_facts(resolve_folder(base)).backbone)
    return config.get("dtype") or config.get("torch_dtype")  # the second is its name before transformers 5


def _config(folder: Path) -> dict[str, Any]:
    file = folder / "config.json"
    return dict(json.loads(file.read_text("utf-8"))) if file.is_file() else {}


def _notes(source: Path, given: str | None, saved: str, stored: str | None) -> tuple[str, ...]:
    notes = []
    if _trained_on_4_bits(source / RECIPE_FILE):
        notes.append(
            "the adapter was trained over a 4-bit (nf4) base and is merged into the full-precision one; its vectors "
            "differ from those of the training run by what 4 bits round off"
        )
    if given is not None:
        notes.append(f"the base is {given}, as given; whether the adapter was trained on its weights cannot be told")
    if saved == "bfloat16" and stored == "float32":
        notes.append("the base is stored in float32; bfloat16 keeps 8 bits of each weight's precision")
    return tuple(notes)


def _trained_on_4_bits(recipe: Path) -> bool:
    if not recipe.is_file():
        return False
    try:
        return bool(yaml.safe_load(recipe.read_text("utf-8"))["model"].get("dtype") == "nf4")
    except (yaml.YAMLError, KeyError, TypeError, AttributeError) as error:
        raise MiaError(f"{recipe} is no recipe of a run ({error}); mend or remove it") from error


def _write_merged(adapter: str, given: str | None, base: str, dtype: str, folder: Path) -> _Probes:
    """Write the merged encoder, and return the probes as the adapter encodes them."""
    loaded, tokenizer, spec = load_parts(adapter, torch.float32, {}, given)
    model: Any = loaded  # a peft model
    encoder = Encoder(model, tokenizer, _spec(adapter, spec, given, base), torch.device("cpu"))
    before = _encode_probes(encoder)
    if not before.vectors.isfinite().all():
        raise MiaError(f"{adapter}: the adapter gives NaN on its base; its weights are broken, take another checkpoint")
    if not hasattr(model, "merge_and_unload"):
        kind = model.peft_config["default"].peft_type
        raise MiaError(f"{adapter}: an adapter of kind {kind} is no change of weights and cannot be merged; LoRA can")
    encoder.model = model.merge_and_unload().to(getattr(torch, dtype))
    encoder.save(folder)
    return before


def _spec(adapter: str, spec: EncoderSpec, given: str | None, base: str) -> EncoderSpec:
    """Return the spec with the base that the weights come from: the adapter's own name would say nothing."""
    ours = folder_facts(resolve_folder(adapter)).kind == "mia"
    if given is None and ours:
        return spec
    return spec.with_changes(base=base, revision=spec.revision if given is None else None)


def _encode_probes(encoder: Encoder) -> _Probes:
    """Encode the probe texts one by one, every view of theirs; what is too long for the encoder is cut."""
    signatures = [signature for _ in _QUERIES for signature in (None, _SUMMARIES)]
    texts = [query for query in _QUERIES for _ in range(2)]
    said = logging.getLogger(TextTokeniser.__module__)
    said.disabled = True  # that a probe was cut is no news to the user
    try:
        queries = encoder.text.queries(texts, signatures, node=True, truncate=True)
    finally:
        said.disabled = False
    sequences = [s for parts in queries for s in parts] + encoder.text.documents(_DOCUMENTS)
    with torch.inference_mode():
        vectors = [embed_batch(encoder.model, pad_sequences([s], encoder.pad_id)) for s in sequences]
    return _Probes(sequences, torch.cat(vectors))


def _compare(adapter: str, before: _Probes, folder: Path, dtype: str) -> tuple[float, float]:
    """Return lowest cosine and largest difference between the adapter's vectors and those of the written folder."""
    after = _encode_probes(Encoder.load(folder, device="cpu", dtype="float32"))
    if after.sequences != before.sequences:
        raise MergeFailed(f"{adapter}: merged, it gives other token ids than before; nothing was written")
    ours, theirs = after.vectors.double(), before.vectors.double()
    cosine = float(torch.nn.functional.cosine_similarity(ours, theirs).min())
    difference = float((ours - theirs).abs().max())
    if not cosine > LEAST_COSINE[dtype]:  # NaN fails too
        advice = "save it in float32 (--dtype float32)" if dtype == "bfloat16" else "serve the adapter unmerged"
        raise MergeFailed(
            f"{adapter}: the merged encoder's lowest cosine to the adapter is {cosine:.6f} over {len(ours)} vectors "
            f"(largest difference {difference:.2g}); {dtype} must exceed {LEAST_COSINE[dtype]}: {advice}; "
            "nothing was written"
        )
    return cosine, difference


def _carry_run(source: Path, folder: Path, output: Path) -> None:
    """Copy recipe and run facts of a checkpoint, their relative folders counted from the new place."""
    recipe, run = source / RECIPE_FILE, source / RUN_FILE
    if recipe.is_file():
        note = "# The adapter that this recipe trains was merged into its base (mia-train merge).\n"
        (folder / RECIPE_FILE).write_text(note + recipe.read_text("utf-8"), "utf-8")
    if run.is_file():
        try:
            facts = json.loads(run.read_text("utf-8"))
            moved = {k: _moved(v, source, output) if k in ("base", "e1") else v for k, v in facts.items()}
        except (ValueError, AttributeError) as error:
            raise MiaError(f"{run} does not hold a JSON object ({error}); mend or remove it") from error
        (folder / RUN_FILE).write_text(json.dumps(moved, indent=2) + "\n", "utf-8")


def _moved(name: str, source: Path, output: Path) -> str:
    """Rename a folder named relative to ``source`` so that it is found from ``output``; ``.`` is the encoder itself."""
    if name == "." or not (name.startswith(".") or (source / name).is_dir()) or os.path.isabs(name):
        return name
    target = Path(os.path.normpath(source.resolve() / name))
    near = target.is_relative_to(output.resolve().parent)
    return os.path.relpath(target, output.resolve()) if near else str(target)


def _write_card(source: Path, folder: Path, report: MergeReport) -> None:
    """Write the card: the run's own with what it says of adapters corrected, or a short one for a foreign adapter."""
    name, old = Path(report.output).resolve().name, source / "README.md"
    text = old.read_text("utf-8") if old.is_file() else ""
    said = (
        f"The adapter was merged into its base by `mia-train merge` and saved in {report.dtype}. Over {report.probes} "
        f"vectors of probe texts the lowest cosine to the adapter is {report.cosine_min:.6f}."
    )
    said = " ".join([said, *(f"Note: {note}." for note in report.notes)])
    if (source / RECIPE_FILE).is_file() and "\n## Training\n" in text:
        text = re.sub(r"^# .*$", f"# {name}", text, count=1, flags=re.M).replace(PEFT_NOTE, "")
        text = re.sub(r"^(\| weights \| LoRA .*) \|$", r"\1, merged into the base |", text, count=1, flags=re.M)
        text = text.replace("\n## Training\n", f"\n## Weights\n\n{said}\n\n## Training\n", 1)
    else:
        text = _short_card(name, said, report.base, text)
    (folder / "README.md").write_text(text, "utf-8")


def _short_card(name: str, said: str, base: str, old: str) -> str:
    from huggingface_hub import ModelCardData

    licence = re.search(r"\A---\n(?:.*\n)*?license: *([\w.-]+) *\n", old)
    hub = re.fullmatch(r"[\w.-]+/[\w.-]+", base) is not None
    metadata = ModelCardData(
        base_model=base if hub else None,
        library_name="sentence-transformers",
        pipeline_tag="sentence-similarity",
        license=licence[1] if licence else None,
        tags=["sentence-transformers", "feature-extraction", "retrieval", "mia"],
    )
    shown = Path(base).name if os.path.isabs(base) else base
    use = '```python\nfrom mia_serve.core import Encoder\n\nencoder = Encoder.load("PATH")\n```'
    return (
        f"---\n{metadata.to_yaml()}\n---\n\n# {name}\n\nAn encoder of MiA on the base `{shown}`.\n\n"
        f"## Use\n\n{use}\n\n## Weights\n\n{said}\n"
    )
