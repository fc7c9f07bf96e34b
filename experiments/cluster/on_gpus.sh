#!/usr/bin/env bash
# Training on a cluster's answers, and the rate of a cluster beside that of local pools, on a machine with two GPUs.
# With one GPU the trainings follow each other, and the rate is that of one GPU.
#
# bash experiments/cluster/on_gpus.sh OUT [SECONDS of training] [SECONDS of the rate]       (under 4 minutes by default)
#
# Two trainings run beside each other, each with one GPU and half of the cores: one with `--cluster local`; one with
# `--cluster ADDRESS`, by a process that sees no GPU, against `ray start --head`. Then local pools and a cluster of both
# GPUs take turns to evaluate the same programs (rate.py). No network; RAYSITE is where Ray is, if it is not installed.
# FAKE=1 tries it without a GPU.
set -u
OUT=$(mkdir -p "${1:?folder for what is written}" && cd "$1" && pwd)
TRAIN=${2:-60} RATE=${3:-125} PORT=${PORT:-6399} PYTHON=${PYTHON:-python3}
export PYTHONPATH="$PWD${RAYSITE:+:$RAYSITE}${PYTHONPATH:+:$PYTHONPATH}"
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0 RAY_AUTH_MODE=disabled RAY_TMPDIR=/tmp RAY_USAGE_STATS_ENABLED=0 RAY_worker_niceness=0
read -r FIRST SECOND <<<"$("$PYTHON" -c '
import os
n = sorted(os.sched_getaffinity(0)); h = max(1, len(n) // 2)
print(",".join(map(str, n[:h])), ",".join(map(str, n[h:] or n)))')"
SEEN=$(nvidia-smi -L 2>/dev/null | wc -l)
OTHER=1 ARMS="local,cluster 2"
[ "$SEEN" != 1 ] || { OTHER=0 ARMS="local,cluster 1"; }
count() { tr , '\n' <<<"$1" | wc -l; }
HEAD=
stop() { [ -z "$HEAD" ] || kill "$HEAD" 2>/dev/null; HEAD=; }
trap stop EXIT

settings=(--set answers=live --set specs=4 --set ppo.steps=24 --set ppo.environments=4 --set ppo.rollout=6
    --set ppo.batch=12 --set ppo.max_steps=4 --seconds "$TRAIN")
[ -z "${FAKE:-}" ] || settings+=(--set device=h100 --set ppo.steps=6 --set ppo.environments=2 --set ppo.rollout=3
    --set ppo.batch=6 --set ppo.max_steps=3 --set specs=2)
train() { # NAME CORES ARGUMENTS…
    local name=$1 cores=$2 began=$SECONDS
    shift 2
    timeout $((TRAIN + 150)) taskset -c "$cores" "$PYTHON" -m qimeng.cli train --out "$OUT/$name" "${settings[@]}" "$@" \
        >"$OUT/$name.log" 2>&1
    echo "train $name: exit $?, $((SECONDS - began)) s" | tee -a "$OUT/summary.txt"
}

in_turn() { [ "$SEEN" != 1 ] || wait "$LOCAL"; }

CUDA_VISIBLE_DEVICES=0 train local "$FIRST" --cluster local &
LOCAL=$!
in_turn
CUDA_VISIBLE_DEVICES=$OTHER taskset -c "$SECOND" "$PYTHON" -c 'import sys; from ray.scripts.scripts import main; sys.exit(main())' \
    start --head --block --node-ip-address=127.0.0.1 --port="$PORT" --include-dashboard=false --disable-usage-stats \
    --num-gpus="$([ -n "${FAKE:-}" ] && echo 0 || echo 1)" --num-cpus="$(count "$SECOND")" \
    --object-store-memory=200000000 >"$OUT/ray.log" 2>&1 &
HEAD=$!
for _ in $(seq 120); do (: <"/dev/tcp/127.0.0.1/$PORT") 2>/dev/null && break || sleep 0.5; done
CUDA_VISIBLE_DEVICES= train address "$SECOND" --cluster "127.0.0.1:$PORT"
"$PYTHON" -m qimeng.cli cluster status "127.0.0.1:$PORT" --json >"$OUT/status.json" 2>"$OUT/status.log"
wait "$LOCAL" 2>/dev/null
stop
"$PYTHON" - "$OUT" <<'END' | tee -a "$OUT/summary.txt"
import json, sys
from pathlib import Path

out = Path(sys.argv[1])
for name in ("local", "address"):
    file = out / name / "report.json"
    report = json.loads(file.read_text()) if file.exists() else {}
    curve = report.get("curve") or [{}]
    print(f"{name}: {report.get('times', 'no report')}; {report.get('evaluations')} evaluations, "
          f"{curve[-1].get('steps')} steps of PPO")
    if not report:
        print((out / f"{name}.log").read_text()[-1500:])
status = (out / "status.json").read_text()
for row in json.loads(status) if status else ():
    print("keeper:", {k: row.get(k) for k in ("gpu", "generation", "visible", "done", "failed", "cpu_tasks", "done_here", "why_here")})
END
[ "$RATE" = 0 ] || "$PYTHON" -m experiments.cluster.rate "$OUT/rate.jsonl" --seconds "$RATE" --arms "$ARMS" \
    --specs 0,1,2,3 ${FAKE:+--fake} 2>&1 | tail -40 | cut -c1-600 | tee -a "$OUT/summary.txt"
