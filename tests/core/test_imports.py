"""What importing the core pulls in, and what the packages may import of each other."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("module", ["mia_serve", "mia_serve.core", "mia_serve.cli"])
def test_importing_the_core_pulls_in_nothing_heavy(module: str):
    heavy = {"faiss", "vllm", "fastapi", "uvicorn", "wandb", "ray", "peft"}
    code = (
        f"import sys; import {module} as it; getattr(it, 'Encoder', None); bad = {heavy} & set(sys.modules); "
        "print(sorted(bad)); sys.exit(bool(bad))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stdout + done.stderr


def imports(file: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def test_imports_run_downstairs():
    levels = [
        "core",
        "llm",
        "mindscape index signature lexical fusion rerank",
        "retriever",
        "rag",
        "eval http",
        "cli",
        "__main__",
    ]
    order = {name: level for level, names in enumerate(levels) for name in names.split()}
    here = {path.name.removesuffix(".py") for path in (ROOT / "mia_serve").iterdir() if path.name[0] not in "._"}
    assert here - {"__pycache__", "py.typed"} <= set(order) | {"__main__"}, "a floor that has no place yet"
    for file in (ROOT / "mia_serve").rglob("*.py"):
        here = file.relative_to(ROOT / "mia_serve").parts[0].removesuffix(".py")
        for name in imports(file):
            assert not name.startswith("mia_train"), f"{file}: mia_serve never imports mia_train"
            parts = name.split(".")
            if parts[0] == "mia_serve" and len(parts) > 1 and here in order and parts[1] in order:
                assert parts[1] == here or order[parts[1]] < order[here], f"{file} imports {name}, a higher floor"
