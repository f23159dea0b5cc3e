"""``mia-train run`` and ``mia-train check``."""

from __future__ import annotations

from typing import Annotated, Optional

import typer

Overrides = Annotated[
    Optional[list[str]],  # noqa: UP045 (typer reads the annotation at run time)
    typer.Option("--set", metavar="KEY=VALUE", help="Change one recipe value, such as training.max_steps=20."),
]


def run(
    recipe: Annotated[str, typer.Argument(help="Recipe file (YAML).")],
    overrides: Overrides = None,
    resume: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="PATH|auto", help="Go on from a checkpoint folder, or from the last one in output_dir."),
    ] = None,
) -> None:
    """Train one recipe. For several processes: accelerate launch [...] -m mia_train run RECIPE."""
    from mia_serve.core.errors import MiaError
    from mia_train.config import GeneratorRecipe, load_any_recipe, missing_inputs, recipe_warnings
    from mia_train.launch import prepare_launch, process_rank

    loaded = load_any_recipe(recipe, overrides or [])
    missing = missing_inputs(loaded)
    if missing:
        raise MiaError(f"{recipe}: {'; '.join(missing)}")
    prepare_launch()
    if process_rank() == 0:
        for warning in recipe_warnings(loaded):
            typer.echo(f"warning: {warning}", err=True)
    if isinstance(loaded, GeneratorRecipe):
        from mia_train.generator.train import run as train_generator

        train_generator(loaded, resume)
    else:
        from mia_train.trainer import run as train

        train(loaded, resume)


def check(
    recipes: Annotated[list[str], typer.Argument(help="Recipe files.")],
    overrides: Overrides = None,
    processes: Annotated[int, typer.Option(min=1, help="Processes to work the numbers out for.")] = 1,
    files: Annotated[
        bool, typer.Option("--files", help="Also fail when a row file or local model is missing.")
    ] = False,
    json_file: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option("--json", metavar="FILE", help="Write the facts as JSON; - for standard output."),
    ] = None,
) -> None:
    """Validate recipes and print what they come to. Loads no weights and reads no rows."""
    import json
    from dataclasses import asdict
    from pathlib import Path

    from mia_serve.core.errors import MiaError
    from mia_train.config import GeneratorRecipe, load_any_recipe
    from mia_train.generator.plan import GeneratorPlan, format_generator_plan, make_generator_plan
    from mia_train.plan import Plan, format_plan, make_plan

    facts, wrong = [], False
    for path in recipes:
        try:
            loaded = load_any_recipe(path, overrides or [])
            plan: Plan | GeneratorPlan
            if isinstance(loaded, GeneratorRecipe):
                plan = make_generator_plan(loaded, processes)
                lines = format_generator_plan(plan)
            else:
                plan = make_plan(loaded, processes)
                lines = format_plan(plan)
        except MiaError as error:
            typer.echo(f"error: {error}", err=True)
            wrong = True
            continue
        facts.append({"recipe": path, **asdict(plan)})
        if json_file != "-":
            typer.echo(f"{path}: valid\n{lines}")
        for warning in plan.warnings:
            typer.echo(f"warning: {path}: {warning}", err=True)
        for line in plan.missing:
            typer.echo(f"{'error' if files else 'not here yet'}: {path}: {line}", err=True)
        wrong = wrong or (files and bool(plan.missing))
    if json_file == "-":
        typer.echo(json.dumps(facts, indent=2, ensure_ascii=False))
    elif json_file:
        Path(json_file).write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    if wrong:
        raise typer.Exit(2)
