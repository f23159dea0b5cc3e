"""Read a recipe: YAML and ``--set`` in, a checked :class:`Recipe` or a one-line error out."""

from __future__ import annotations

import difflib
import importlib.util
import os
import re
import types
import typing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from mia_serve.core.errors import MiaError
from mia_train.generator.schema import GeneratorRecipe, generator_warnings
from mia_train.schema import (
    METRICS,
    BenchmarkRef,
    DataConfig,
    DistillConfig,
    LoraSection,
    LossConfig,
    ModelConfig,
    Recipe,
    TrainingSection,
    is_row_file,
    parse_benchmark,
)

__all__ = [
    "METRICS",
    "BenchmarkRef",
    "DataConfig",
    "GeneratorRecipe",
    "LoraSection",
    "LossConfig",
    "ModelConfig",
    "Recipe",
    "TrainingSection",
    "dump_recipe",
    "is_row_file",
    "load_any_recipe",
    "load_recipe",
    "missing_inputs",
    "parse_benchmark",
    "recipe_warnings",
]


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuse a key given twice, of which PyYAML would silently keep the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":  # "<<", whose keys the mapping may give again
                continue
            key = self.construct_object(key_node, deep=deep)
            if isinstance(key, str) and key in seen:
                raise MiaError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice; keep one")
            seen.add(key if isinstance(key, str) else None)
        return super().construct_mapping(node, deep=deep)


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe:
    """Load a retriever's recipe as :func:`load_any_recipe` does.

    Raises:
        MiaError: One line that names the file, the YAML path and the fix; also for a generator's recipe.
    """
    recipe = load_any_recipe(path, overrides)
    if isinstance(recipe, GeneratorRecipe):
        raise MiaError(f"{path}: task: generator; give a retriever's recipe here, which has no task")
    return recipe


def load_any_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe | GeneratorRecipe:
    """Load a recipe for whatever its ``task`` names: ``a.b=c`` overrides applied, paths resolved, all checked but data.

    A relative path is taken from where it is written: in the file from the file's folder, in an override from the
    current folder. Hub ids, ``package:`` names and benchmark names are left alone. Overriding ``training.max_steps``
    replaces ``epochs`` and the reverse.

    Args:
        path: YAML file.
        overrides: ``section.key=value`` strings, the value read as YAML.

    Raises:
        MiaError: One line that names the file, the YAML path and the fix.
    """
    path = Path(path)
    content = _resolve_paths(_read_yaml(path), path.resolve().parent)
    sources: dict[str, str] = {}
    for override in overrides:
        keys, value = _parse_override(override)
        sources[".".join(keys)] = override
        nested: Any = value
        for key in reversed(keys):
            nested = {key: nested}
        _merge(content, _resolve_paths(nested, Path.cwd()))
        if keys in (["training", "max_steps"], ["training", "epochs"]) and value is not None:
            content["training"].pop("epochs" if keys[1] == "max_steps" else "max_steps", None)
    schema = _schema_of(content, path)
    try:
        recipe = schema.model_validate(content)
    except ValidationError as error:
        raise MiaError(_explain(error, path, sources, schema)) from None
    for tracker in recipe.training.report_to:
        found = importlib.util.find_spec(tracker)
        if found is None or found.origin is None:  # no origin: just a folder of that name, such as wandb's own ./wandb
            raise MiaError(
                f"{path}: training.report_to: {tracker} is not installed; run `pip install {tracker}`, or leave it out "
                "(the JSONL log is always written)"
            )
    return recipe


def dump_recipe(recipe: Recipe | GeneratorRecipe, path: str | Path) -> None:
    """Write the resolved recipe, every default filled in, so that the run can be repeated from this file alone."""
    content = yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False, allow_unicode=True, width=120)
    Path(path).write_text(f"# mia-train run {Path(path).name}\n{content}", encoding="utf-8")


def missing_inputs(recipe: Recipe | GeneratorRecipe) -> list[str]:
    """Name every input of the recipe that is not on this machine, one line each; hub ids are not looked up."""
    missing = []
    places: list[tuple[str, str | None]] = [("model.base", recipe.model.base)]
    evaluated = mindscape = None
    if isinstance(recipe, GeneratorRecipe):
        places.append(("data.encoder", recipe.data.encoder))
    else:
        places.append(("data.signature_encoder", recipe.data.signature_encoder))
        evaluated, mindscape = recipe.data.eval, recipe.data.mindscape
    for where, value in places:
        if value and os.path.isabs(value) and not Path(value).is_dir():
            missing.append(f"{where}: no folder {value}")
        elif value and value.startswith("package:"):
            module = value.removeprefix("package:").split("/")[0]
            if not module.isidentifier() or importlib.util.find_spec(module) is None:
                missing.append(f"{where}: {value}: no installed Python package {module!r}; pip install it")
    if mindscape and not Path(mindscape).is_dir():
        missing.append(f"data.mindscape: no folder {mindscape}")
    named = [(f"data.train[{i}]", source) for i, source in enumerate(recipe.data.train)]
    named += [("data.eval", evaluated)] if evaluated else []
    for where, source in named:
        if is_row_file(source):
            if not Path(source).is_file():
                missing.append(f"{where}: no file {source}")
        elif parse_benchmark(source).name != "saltmarsh":  # which comes with the package
            folder = os.environ.get("MIA_DATA")
            if not folder or not Path(folder).is_dir():
                state = f"names {folder}, which is no folder" if folder else "is not set"
                missing.append(f"{where}: {source} is read from the folder in MIA_DATA, which {state}")
    return missing


def recipe_warnings(recipe: Recipe | GeneratorRecipe) -> list[str]:
    """Name what is allowed but rarely meant, one line each."""
    if isinstance(recipe, GeneratorRecipe):
        return generator_warnings(recipe)
    data, training, notes = recipe.data, recipe.training, []
    if recipe.loss.negatives == "in_batch" and training.accumulation > 1:
        notes.append(
            f"training.accumulation: {training.accumulation} passes of {training.batch_size} rows see the in-batch "
            f"negatives of {training.batch_size} rows, not of {training.accumulation * training.batch_size}; "
            "raise batch_size for more negatives (training.mini_batch_tokens keeps its memory small)"
        )
    if data.view == "query":
        unused = data.model_fields_set & {
            "mindscape",
            "signature_encoder",
            "signature_dropout",
            "signature_gold",
            "signature_noise",
            "signature_mode",
        }
        notes += [f"data.{key}: has no effect with data.view: query" for key in sorted(unused)]
    notes += _loss_warnings(recipe)
    if data.eval is None:
        unused = training.model_fields_set & {"metric", "eval_steps"}
        notes += [f"training.{key}: has no effect without data.eval" for key in sorted(unused)]
    elif any(source.split(":")[:2] == data.eval.split(":")[:2] for source in data.train):
        notes.append(f"data.eval: {data.eval} is trained on, so it says nothing about new questions")
    return notes


def _loss_warnings(recipe: Recipe) -> list[str]:
    """Name what the loss and the gradient cache are told to no effect."""
    data, loss, model, notes = recipe.data, recipe.loss, recipe.model, []
    if data.view == "query":
        notes += [
            f"loss.{key}: with data.view: query both views are one, so it only adds the same loss again"
            for key in ("query_view", "signature_view")
            if getattr(loss, key) > 0
        ]
    elif data.signature_dropout == 1:
        notes.append("data.signature_dropout: 1 leaves every signature out, so the query alone is trained")
    elif model.alpha == 0 and loss.signature_view == 0:
        notes.append("model.alpha: 0 keeps the signature out of the loss; raise it, or give loss.signature_view")
    distill = loss.distill
    if distill is not None and distill.kind == "margin_mse" and distill.temperature != DistillConfig().temperature:
        notes.append("loss.distill.temperature: has no effect with kind: margin_mse")
    if loss.contrastive == 0:
        default = LossConfig()
        notes += [
            f"loss.{key}: has no effect with loss.contrastive: 0"
            for key in ("negatives", "temperature", "mask_margin")
            if getattr(loss, key) != getattr(default, key)
        ]
    longest = max(model.max_query_tokens or 0, model.max_document_tokens or 0)
    budget = recipe.training.mini_batch_tokens
    if budget is not None and budget < longest:
        notes.append(
            f"training.mini_batch_tokens: {budget} is less than one text of {longest} tokens, which then goes alone, "
            "over the budget"
        )
    return notes


def _schema_of(content: dict[str, Any], path: Path) -> type[Recipe] | type[GeneratorRecipe]:
    if "task" not in content:
        return Recipe
    if content["task"] != "generator":
        raise MiaError(f"{path}: task: {content['task']!r}; allowed: generator (a retriever's recipe has no task)")
    return GeneratorRecipe


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_UniqueKeyLoader)
    except FileNotFoundError:
        near = difflib.get_close_matches(path.name, [p.name for p in path.parent.glob("*.yaml")], n=1)
        hint = f"; did you mean {path.parent / near[0]}?" if near else ""
        raise MiaError(f"no recipe {path}{hint}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise MiaError(f"{path}: cannot be read: {error}") from None
    except MiaError as error:
        raise MiaError(f"{path}: {error}") from None
    except yaml.YAMLError as error:
        raise MiaError(f"{path}: not valid YAML: {_one_line(error)}") from None
    if not isinstance(content, dict):
        raise MiaError(f"{path}: a recipe is a mapping with the keys {', '.join(Recipe.model_fields)}")
    return content


def _parse_override(override: str) -> tuple[list[str], Any]:
    name, equals, text = override.partition("=")
    keys = name.strip().split(".")
    if not equals or not all(keys):
        raise MiaError(f"--set {override!r}: give section.key=value, such as training.max_steps=20")
    try:
        return keys, yaml.load(text, Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, MiaError) as error:
        raise MiaError(f"--set {override!r}: the value is not valid YAML: {_one_line(error)}") from None


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())


def _merge(into: dict[str, Any], changes: dict[str, Any]) -> None:
    for key, value in changes.items():
        if isinstance(value, dict) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _resolve_paths(content: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Make the relative paths of a raw recipe absolute; whatever has a wrong type is left to the schema."""

    def absolute(value: str) -> str:
        return os.path.normpath(folder / Path(value).expanduser())

    def encoder(value: Any) -> Any:  # "a/b" may be a hub id or a folder
        if not isinstance(value, str) or not value or value.startswith("package:"):
            return value
        is_path = value in (".", "..") or value.startswith(("./", "../", "~", "/"))
        return absolute(value) if is_path or (folder / value).is_dir() else value

    def rows(value: Any) -> Any:
        if isinstance(value, list):
            return [rows(item) for item in value]
        return absolute(value) if isinstance(value, str) and is_row_file(value) else value

    resolvers = {
        ("model", "base"): encoder,
        ("data", "signature_encoder"): encoder,
        ("data", "encoder"): encoder,
        ("data", "mindscape"): lambda value: absolute(value) if isinstance(value, str) and value else value,
        ("data", "train"): rows,
        ("training", "output_dir"): lambda value: absolute(value) if isinstance(value, str) and value else value,
    }
    for (section, key), resolve in resolvers.items():
        values = content.get(section)
        if isinstance(values, dict) and key in values:
            values[key] = resolve(values[key])
    return content


def _explain(error: ValidationError, path: Path, overrides: dict[str, str], schema: type[BaseModel]) -> str:
    """Turn the first of pydantic's errors into one line; an unknown key goes first, it often causes the others."""
    errors = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
    first = errors[0]
    # Steps such as "literal['all-linear']" are pydantic's, for the branches of a union.
    location = [step for step in first["loc"] if isinstance(step, int) or not re.search(r"[\[(]", str(step))]
    if first["type"] == "extra_forbidden":
        location = list(first["loc"])
    where = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location).lstrip(".")
    message = first["msg"].removeprefix("Value error, ")
    if first["type"] == "extra_forbidden":
        message = _unknown_key([str(step) for step in location], schema)
    elif first["type"] == "missing":
        message = "is missing and has no default"
    elif first["type"] != "value_error":
        message = f"{message[0].lower()}{message[1:]}, got {first['input']!r}"
    more = f" ({len(errors) - 1} more)" if len(errors) > 1 else ""
    spoken = where or message.split(":")[0]
    unknown = first["type"] == "extra_forbidden"
    blamed = [
        f"--set {text}"
        for key, text in overrides.items()
        if spoken == key or spoken.startswith((f"{key}.", f"{key}[")) or (unknown and key.startswith(f"{spoken}."))
    ]
    source = blamed[0] if blamed else str(path)
    return f"{source}: {where}: {message}{more}" if where else f"{source}: {message}{more}"


def _unknown_key(location: list[str], schema: type[BaseModel]) -> str:
    allowed = _fields(location[:-1], schema)
    paths = [f"{section}.{key}" for section in schema.model_fields for key in _fields([section], schema)]
    near = difflib.get_close_matches(location[-1], allowed, n=1, cutoff=0.6)
    # A key in the wrong section is the commonest slip after a misspelt one.
    elsewhere = [path for path in paths if path.split(".")[1] == location[-1]]
    elsewhere += difflib.get_close_matches(".".join(location), paths, n=1)
    nearest = [".".join([*location[:-1], near[0]])] if near else elsewhere
    hint = f"; did you mean {nearest[0]}?" if nearest else ""
    return f"unknown key{hint} (allowed here: {', '.join(allowed)})"


def _fields(location: list[str], schema: type[BaseModel]) -> list[str]:
    model = schema
    for step in location:
        annotation = model.model_fields[step].annotation
        options = typing.get_args(annotation) if isinstance(annotation, types.UnionType) else (annotation,)
        nested = [option for option in options if isinstance(option, type) and issubclass(option, BaseModel)]
        if not nested:
            return []
        model = nested[0]
    return list(model.model_fields)
