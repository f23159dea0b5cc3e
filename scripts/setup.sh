#!/usr/bin/env bash
# scripts/setup.sh VENV EXTRAS: make a virtual environment (once) and install MiA into it with the pins that are tested.
set -euo pipefail
venv=$1 extras=$2
root=$(cd "$(dirname "$0")/.." && pwd)
[ -x "$venv/bin/python" ] || "${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/python" -m pip install --quiet uv
# uv does not look where pip was told to look; let it.
export UV_FIND_LINKS="${UV_FIND_LINKS:-${PIP_FIND_LINKS:-}}"
"$venv/bin/uv" pip install --quiet --python "$venv/bin/python" --constraint "$root/scripts/constraints.txt" --editable "$root[$extras]"
