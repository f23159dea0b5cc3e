#!/usr/bin/env bash
# The main job from nothing, on a CPU and without a model hub: set up, fine-tune E1 and E2 from MiniLM on a small
# detective series, build its mindscape, choose a signature, and print what each step is worth.
set -euo pipefail
cd "$(dirname "$0")/.."
venv=${VENV:-.venv} runs=${RUNS:-runs/quickstart}
scripts/setup.sh "$venv" train,serve,llm,quickstart
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
PATH="$PWD/$venv/bin:$PATH"

launch() { accelerate launch --config_file recipes/accelerate/cpu.yaml -m mia_train run "$@" --resume auto; }
launch recipes/e1_minilm_cpu.yaml --set training.output_dir="$PWD/$runs/e1"
launch recipes/e2_minilm_cpu.yaml --set training.output_dir="$PWD/$runs/e2" \
  --set model.base="$PWD/$runs/e1" --set data.signature_encoder="$PWD/$runs/e1"

mia-serve mindscape build --data saltmarsh --encoder "$runs/e1" -o "$runs/mindscape"
mia-serve signature --mindscape "$runs/mindscape" --encoder "$runs/e1" --query "Why did she lie about the boat?"
mia-serve eval retrieval --data saltmarsh --split test --series --encoder "$runs/e2" --e1 "$runs/e1" --json "$runs/table.json"
echo "{\"seconds\": $SECONDS, \"cores\": $(getconf _NPROCESSORS_ONLN)}" | tee "$runs/time.json"
