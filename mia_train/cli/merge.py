"""``mia-train merge``."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Optional

import typer

from mia_serve.cli.common import JsonOption


class SavedDtype(StrEnum):
    """Formats of the merged weights."""

    auto = "auto"
    float32 = "float32"
    bfloat16 = "bfloat16"


def merge(
    adapter: Annotated[str, typer.Argument(help="Adapter folder or checkpoint, or the hub id of one.")],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FOLDER", help="Folder to write; must be new.")],
    base: Annotated[
        Optional[str],  # noqa: UP045
        typer.Option(metavar="NAME", help="Model to merge into; the one that the adapter names by default."),
    ] = None,
    dtype: Annotated[
        SavedDtype, typer.Option(help="Format of the saved weights; auto: bfloat16 where the base is stored so.")
    ] = SavedDtype.auto,
    json_file: JsonOption = None,
) -> None:
    """Merge an adapter into its base. The result is written only if it gives the adapter's vectors."""
    import sys
    from dataclasses import asdict

    from mia_serve.cli.common import check_output, emit

    check_output(json_file, "--json")
    from transformers.utils import logging as transformers_logging

    from mia_train.merge import merge_adapter

    if not sys.stderr.isatty():
        transformers_logging.disable_progress_bar()
    report = merge_adapter(adapter, output, base, dtype.value)
    size = f"{report.size_bytes / 1e6:.1f} MB"
    lines = [
        f"merged {report.adapter} into {report.base}: {report.output} ({report.dtype}, {size})",
        f"checked on {report.probes} vectors: lowest cosine {report.cosine_min:.7f} "
        f"(must exceed {report.least_cosine}), largest difference {report.max_abs_diff:.2g}",
        *(f"note: {note}" for note in report.notes),
    ]
    emit("\n".join(lines) + "\n", asdict(report), json_file)
