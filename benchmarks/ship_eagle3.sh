#!/bin/sh
# Trains the next shipped eagle3 head in at most 20 hours of two cores, and measures it. Stopped at any time and started
# again, it continues where it was.
#   sh benchmarks/ship_eagle3.sh FOLDER DATA [MODEL [MINUTES]]
# DATA has train_prompts.jsonl, train_passages.jsonl and spec_bench_dev.jsonl; the last is for measuring alone.
set -eu
folder=$1 data=$2 model=${3:-smollm2} minutes=${4:-1200}
resume=
[ -e "$folder/trainer.pt" ] && resume=--resume
[ -e "$folder/greedy.json" ] || outpace train eagle3 --model "$model" --out "$folder" $resume --max-minutes "$minutes" \
    --prompts "$data/train_prompts.jsonl" --self-written 0.5 --texts "$data/train_passages.jsonl" --passages 0.3 \
    --exclude "$data/spec_bench_dev.jsonl" --cache-bytes 60e9 --state-bits 8 --threads 2
measured() { # NAME COMMAND...: what was measured before is not measured again
    name=$1
    shift
    [ -e "$folder/$name.json" ] && return
    "$@" > "$folder/$name.unfinished"
    mv "$folder/$name.unfinished" "$folder/$name.json"
}
common="--model $model --prompts $data/spec_bench_dev.jsonl --threads 2 --json"
measured greedy outpace eval-head "$folder" $common --record
measured sampled outpace eval-head "$folder" $common --temperature 0.8
