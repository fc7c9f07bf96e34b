#!/usr/bin/env bash
# The planner's measured path: trees for training, planners, held-out trees, comparison, live times, adaptation.
#   benchmarks/planner.sh OUT SECONDS [NAME ...]
# NAME is collect, train, explore, replay, live or adapt; all of them, in this order, by default. What is left of SECONDS
# is shared out among those that are left, and each ends within its share. With the same OUT, on this machine or on
# another that has a copy of it, each goes on where it ended; OUT holds trees, rows and planners, stores and checkpoints
# lie in SCRATCH (PPO ends in time for the run to be finished as it stands; one that was cut off all the same begins its
# PPO anew on another machine, or all of it before that). One that fails does not keep the others from running.
# Variables: CANDIDATES (what `planners.py list --root KernelBench --json` wrote; without it, the generated half of the
# held-out specs alone), SPECS, ONLY (candidates of each half; 0 for all), RUNS and COMMON (instead of those below), METHODS
# ("LABEL=PLANNER+SEARCH", one a line, to compare besides), DEVICE (to adapt to; h200), JOBS (places on each GPU; 6 for
# the collection, 12 for held-out trees), EACH (seconds that a spec is given; 110 in the collection, 240 for a held-out
# tree), EVALUATIONS (of a spec of the collection; 28), DEPTH (of a held-out tree; 140), SIDE (runs of training on each
# GPU, 2, or on the CPU, 1), GPUS (to train on; all), FINISH (seconds that a run of training has left when its PPO ends; 90), SCRATCH.
set -uo pipefail
out=$1 end=$((SECONDS + $2))
shift 2
names=("$@")
[ $# -gt 0 ] || names=(collect train explore replay live adapt)
declare -A weight=([collect]=6 [train]=5 [explore]=5 [replay]=2 [live]=3 [adapt]=4)
here=$(dirname "$0")
scratch=${SCRATCH:-/tmp/qimeng-planner}
gpus=${GPUS:-$(nvidia-smi -L 2>/dev/null | wc -l || true)}
export TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1

# Settings of every run of training that differ from the library's defaults. At a rate of 3e-4 that does not fall, PPO undid
# what was imitated. No trees are held out: they are too easy to choose weights by, and reports have specs of their own.
# With 16 examples a step took 50 ms, two runs beside each other: mostly the start of small kernels, so 64 a step.
common=${COMMON-imitation.epochs=12 imitation.batch=64 imitation.rate=2e-3 imitation.others=0 held_out=0 validate_every=0 ppo.steps=8192 ppo.rate=2e-4 ppo.target_kl=0.05}

# Runs of training, one a line: name and what is its own. The first is the one that is compared with every search. One
# with `from=NAME` begins with what NAME imitated: the same seed, another reward, say.
runs() {
    [ -z "${RUNS:-}" ] || { echo "$RUNS" && return; }
    cat <<-END
	seed0 reward=milestones
	seed1 reward=milestones seed=1
	seed2 reward=milestones seed=2
	anytime from=seed0 reward=anytime
	paper from=seed0 reward=paper
	log-speedup from=seed0 reward=log-speedup
	coverage from=seed0 reward=milestones coverage=0.5
	anytime1 from=seed1 reward=anytime seed=1
	alone imitation.epochs=0 ppo.rate=1e-3 reward=milestones
	untrained imitation.epochs=0 ppo.steps=0
	END
}

first=$(runs | head -n 1 | cut -d ' ' -f 1)
qimeng() { python3 -m qimeng.cli "$@"; }

# A command with so many seconds; ended with the script.
limited() {
    local seconds=$1
    shift
    [ "$seconds" -gt 0 ] || return 1
    timeout -k 5 "$seconds" "$@" &
    child=$!
    trap 'end=0; kill $child' TERM INT # also of a subshell, which has lost the script's
    wait $child                        # a signal interrupts this, not a command in the foreground
}

# The collection NAME in SCRATCH, from its trees and its log in OUT where it is not there.
restore() {
    local work=$scratch/$1
    mkdir -p "$work"
    [ -s "$work/store.sqlite" ] || [ ! -s "$out/$1.xz" ] ||
        qimeng collect merge "$work" "$out/$1.xz" ${CANDIDATES:+--listed "$CANDIDATES"} || return 1
    [ -s "$work/explored.jsonl" ] || [ ! -s "$out/$1.jsonl" ] || cp "$out/$1.jsonl" "$work/explored.jsonl"
    [ -s "$work/candidates.json" ] || [ ! -s "$out/$1.json" ] || cp "$out/$1.json" "$work/candidates.json"
}

# Its trees, log and candidates to OUT, whole or not at all; without the text of KernelBench's problems, so that they may
# be kept in the repository.
keep() {
    local work=$scratch/$1
    [ -s "$work/store.sqlite" ] || return 1
    qimeng collect export "$work" "$out/$1.xz.part" --without-source kernelbench && mv "$out/$1.xz.part" "$out/$1.xz"
    [ ! -s "$work/explored.jsonl" ] || cp "$work/explored.jsonl" "$out/$1.jsonl"
    [ ! -s "$work/candidates.json" ] || cp "$work/candidates.json" "$out/$1.json"
}

# An estimate, from 3.7 programs a second of 12 places on two H200s: one place takes some 100 s for the 28 of a spec, and
# 300 specs take half an hour on four. With 4 to 8 each, chance finds the best of a tree at once. What was judged
# earlier comes from the store. Sizes up to 256 MiB: six judges fit one GPU, and checking takes less than timing.
collect() {
    restore trees || return 1
    limited $(($1 - 25)) python3 -m qimeng.cli collect --out "$scratch/trees" --specs "${SPECS:-400}" \
        --families pointwise,reduction,normalization,softmax,product,block --most-mib 256 \
        --evaluations "${EVALUATIONS:-28}" --seconds-each "${EACH:-110}" --total-seconds $(($1 - 45)) --overhead-seconds 15 --jobs "${JOBS:-6}"
    keep trees
}

# Each place takes the next run of the list; some share a GPU, which a small model does not fill.
train() {
    local until=$((SECONDS + $1)) place places=$((gpus > 0 ? ${SIDE:-2} * gpus : ${SIDE:-1}))
    [ -s "$out/trees.xz" ] || { echo "no trees: collect first" && return 1; }
    rm -rf "$scratch/taken"
    mkdir -p "$scratch/taken" "$out/planners"
    for ((place = 0; place < places; place++)); do
        while read -r name settings; do
            [ "$end" -gt 0 ] && mkdir "$scratch/taken/$name" 2>/dev/null && one_run "$place" "$until" "$name" $settings
        done < <(runs) & # its own process, which a signal to the script is handed on to
    done
    wait
    finished "$(runs | wc -l)"
}

# Planner NAME, trained on the trees with these settings, at a place and until a time.
one_run() {
    local place=$1 until=$2 name=$3 setting options=()
    shift 3
    unpack "$name"
    [ ! -s "$scratch/$name/report.json" ] || return 0
    for setting in $common "$@"; do
        case $setting in
        from=*) take_up "$name" "${setting#from=}" "$until" || return 0 ;;
        *) options+=(--set "$setting") ;;
        esac
    done
    TOKENIZERS_PARALLELISM=true on_gpu "$place" limited $((until - SECONDS - 5)) python3 -m qimeng.cli train "$out/trees.xz" --out "$scratch/$name" \
        --seconds $((until - SECONDS - ${FINISH:-90})) ${options[@]+"${options[@]}"} >>"$scratch/$name.log" 2>&1
    pack "$name"
}

# What the run OTHER imitated becomes what NAME did, once it is there; fails where it does not come in time.
take_up() {
    local name=$1 other=$2 until=$3
    unpack "$other"
    until [ -s "$scratch/$other/imitated/figures.json" ]; do # written last
        [ $((SECONDS + 60)) -lt "$until" ] && [ "$end" -gt 0 ] && sleep 1 || return 1
    done
    [ -s "$scratch/$name/imitated/figures.json" ] && return 0
    mkdir -p "$scratch/$name" && cp -r "$scratch/$other/imitated" "$scratch/$name/" && touch "$scratch/$name/taken"
}

on_gpu() {
    local place=$1
    shift
    if [ "$gpus" -gt 0 ]; then
        NVIDIA_TF32_OVERRIDE=1 CUDA_VISIBLE_DEVICES=$((place % gpus)) OMP_NUM_THREADS=4 "$@"
    else
        OMP_NUM_THREADS=$((($(nproc) + ${SIDE:-1} - 1) / ${SIDE:-1})) "$@" # two runs of one thread do more than one of two
    fi
}

# A finished run to OUT, its checkpoint left out; its report as a row; what it imitated, unless another run did.
pack() {
    local name=$1
    if [ ! -s "$scratch/$name/report.json" ]; then
        echo "$name: not finished"
        tail -n 3 "$scratch/$name.log"
        [ ! -s "$scratch/$name/imitated/figures.json" ] || { halve "$scratch/$name" &&
            tar -C "$scratch" --exclude checkpoint.pt -czf "$out/planners/$name.begun.tar.gz" "$name"; }
        return 1
    fi
    [ ! -s "$out/planners/$name.tar.gz" ] || return 0
    rm -f "$scratch/$name/checkpoint.pt"
    halve "$scratch/$name"
    local left=()
    [ ! -e "$scratch/$name/taken" ] || left=(--exclude imitated)
    tar -C "$scratch" ${left[@]+"${left[@]}"} -czf "$out/planners/$name.part" "$name" &&
        mv "$out/planners/$name.part" "$out/planners/$name.tar.gz"
    rm -f "$out/planners/$name.begun.tar.gz"
    python3 - "$name" "$scratch/$name/report.json" >>"$out/runs.jsonl" <<-END
	import json, sys
	print(json.dumps({"run": sys.argv[1], **json.load(open(sys.argv[2]))}))
	END
}

# Weights in half precision: what travels is half as large.
halve() {
    python3 - "$1" <<-END
	import pathlib, sys
	from safetensors.torch import load_file, save_file
	for path in pathlib.Path(sys.argv[1]).glob("**/model.safetensors"):
	    save_file({k: v.half() for k, v in load_file(path).items()}, path, {"format": "pt"})
	END
}

# A packed run to SCRATCH, whole or not at all: others may wait for it, or unpack it at the same time.
unpack() {
    local kind part
    for kind in tar.gz begun.tar.gz; do
        if [ ! -e "$scratch/$1" ] && [ -s "$out/planners/$1.$kind" ]; then
            part=$(mktemp -d "$scratch/unpacking.XXXXXX")
            tar -C "$part" -xzf "$out/planners/$1.$kind" && mv -T "$part/$1" "$scratch/$1" 2>/dev/null
            rm -rf "$part"
        fi
    done
}

finished() {
    local count
    count=$(find "$out/planners" -name '*.tar.gz' ! -name '*.begun.tar.gz' | wc -l)
    echo "$count planners are there"
    [ "$count" -ge "$1" ]
}

# What is compared: the first run with every search, imitation alone, the others; nothing of theirs where there is none.
methods() {
    options=()
    unpack "$first"
    if [ -s "$scratch/$first/planner.json" ]; then
        options=(--lm "RL=$scratch/$first" --method "imitation=lm:$scratch/$first/imitated"
            --method "imitation, best-of-n=lm:$scratch/$first/imitated+best-of-n")
    fi
    local name settings
    while read -r name settings; do
        unpack "$name"
        [ "$name" = "$first" ] || [ ! -s "$scratch/$name/planner.json" ] ||
            options+=(--method "$name=lm:$scratch/$name" --method "$name, best-of-n=lm:$scratch/$name+best-of-n")
    done < <(runs)
    while read -r name; do [ -z "$name" ] || options+=(--method "$name"); done <<<"${METHODS:-}"
}

# A candidate that ran out of seconds is gone on with once all have been looked at. Its language models think on the CPU,
# with few threads each.
explore() {
    restore heldout || return 1
    methods
    limited $(($1 - 25)) env OMP_NUM_THREADS=2 python3 "$here/planners.py" explore ${CANDIDATES:+--listed "$CANDIDATES"} --out "$scratch/heldout" \
        --evaluations "${DEPTH:-140}" --seconds-each "${EACH:-240}" --total-seconds $(($1 - 50)) --jobs "${JOBS:-12}" \
        --only "${ONLY:-0}" ${options[@]+"${options[@]}"}
    keep heldout
}

replay() {
    restore heldout || return 1
    methods
    limited $(($1 - 5)) python3 "$here/planners.py" replay --out "$scratch/heldout" --rows "$out/replays.jsonl" \
        --total-seconds $(($1 - 15)) ${options[@]+"${options[@]}"} &&
        python3 "$here/planners.py" table "$out/replays.jsonl" >"$out/planners.md"
}

live() {
    restore heldout || return 1
    limited $(($1 - 5)) python3 "$here/planners.py" live --out "$scratch/heldout" --rows "$out/replays.jsonl" \
        --timed "$out/live.jsonl" --jobs 3 --total-seconds $(($1 - 15))
}

# From a planner trained on estimates for another GPU to the measured trees, with three budgets.
adapt() {
    local until=$((SECONDS + $1)) budget place=0
    restore estimates || return 1
    limited $(($1 / 3)) python3 -m qimeng.cli collect --out "$scratch/estimates" --specs 100 --seed 31 --device a100 \
        --families pointwise,reduction,normalization,softmax,product,block --most-mib 256 \
        --seconds-each 60 --total-seconds $(($1 / 3 - 10)) --overhead-seconds 10 --jobs "$(nproc)"
    keep estimates
    mkdir -p "$out/planners"
    unpack base
    [ -s "$scratch/base/report.json" ] || on_gpu 0 limited $(((until - SECONDS) / 2)) python3 -m qimeng.cli train \
        "$out/estimates.xz" --out "$scratch/base" >>"$scratch/base.log" 2>&1
    pack base || return 1
    for budget in 100 300 1000; do
        unpack "adapt$budget"
        {
            [ -s "$scratch/adapt$budget/report.json" ] || on_gpu "$place" limited $((until - SECONDS - 5)) \
                python3 -m qimeng.cli adapt "$scratch/base" "$out/trees.xz" --device "${DEVICE:-h200}" \
                --evaluations "$budget" --out "$scratch/adapt$budget" >>"$scratch/adapt$budget.log" 2>&1
            pack "adapt$budget"
        } &
        place=$((place + 1))
    done
    wait
}

mkdir -p "$out" "$scratch"
. "$here/in_turn.sh"
in_turn 60
