#!/usr/bin/env bash
# Set up an environment of its own (.venv-test) and run every check: style, types, tests. Arguments go to pytest.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh .venv-test train,serve,dev
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
.venv-test/bin/ruff check .
.venv-test/bin/ruff format --check .
.venv-test/bin/mypy
.venv-test/bin/python scripts/prepare_models.py qwen3-tokenizer
exec .venv-test/bin/python -m pytest -m "not slow and not gpu and not vllm" "$@"
