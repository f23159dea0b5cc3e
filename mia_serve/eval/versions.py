"""Versions of what a number depends on."""

from __future__ import annotations

import platform
from collections.abc import Iterable
from importlib import metadata

#: Distributions that change a vector, a ranking or a metric.
PACKAGES = (
    "mia-retrieval",
    "torch",
    "transformers",
    "tokenizers",
    "sentence-transformers",
    "peft",
    "accelerate",
    "numpy",
    "bm25s",
    "faiss-cpu",
    "faiss-gpu",
    "pytrec-eval-terrier",
)


def package_versions(names: Iterable[str] = PACKAGES) -> dict[str, str | None]:
    """Look up installed versions without importing anything; None where a package is not installed."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = None
    return found
