#!/bin/sh
# Trains the next shipped eagle3 head in at most 20 hours of two cores, and measures it. Stopped at any time and started
# again, it continues where it was.
#   sh benchmarks/ship_eagle3.sh FOLDER DATA [MODEL [MINUTES [HEAD [RATE [SEED]]]]]
# DATA has train_prompts.jsonl, train_passages.jsonl and spec_bench_dev.jsonl; the last is for measuring alone.
# HEAD: what the training begins from, "eagle3" for the shipped head or the FOLDER of an earlier part; "" for new weights.
# Of the 20 hours parts may run on several machines, one after the other, with nothing but the folder's config.json,
# model.safetensors and training.json carried over. Give each part its own SEED, which orders prompts and writes others,
# and a lower RATE than the part before.
set -eu
folder=$1 data=$2 model=${3:-smollm2} minutes=${4:-1200} head=${5:-} rate=${6:-} seed=${7:-0}
[ -e "$folder/trainer.pt" ] || [ -e "$folder/spent.json" ] && resume=--resume || resume=
[ -e "$folder/greedy.json" ] || outpace train eagle3 --model "$model" --out "$folder" $resume --max-minutes "$minutes" \
    --prompts "$data/train_prompts.jsonl" --self-written 0.5 --texts "$data/train_passages.jsonl" --passages 0.3 \
    --exclude "$data/spec_bench_dev.jsonl" --cache-bytes 60e9 --state-bits 8 --threads 2 --seed "$seed" \
    ${head:+--from "$head"} ${rate:+--rate "$rate"}
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
