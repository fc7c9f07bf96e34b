#!/usr/bin/env bash
# How far the judge can be trusted: exploits and honest kernels, mutants, the soak, the cost, the stability of times.
#   benchmarks/trust.sh OUT SECONDS [NAME ...]
# NAME is exploits, mutants, soak, cost or stability; all of them, in this order, by default. What is left of SECONDS is
# shared out among those that are left. Each goes on where it ended when this is started again with the same OUT; rows
# go to OUT/NAME.jsonl, tables are printed. One that fails does not keep the others from running.
set -uo pipefail
out=$1 end=$((SECONDS + $2))
shift 2
names=("$@")
[ $# -gt 0 ] || names=(exploits mutants soak cost stability)
declare -A weight=([exploits]=2 [mutants]=3 [soak]=5 [cost]=1 [stability]=2)
here=$(dirname "$0")
gpus=$(nvidia-smi -L 2>/dev/null | wc -l || true)

exploits() { python3 "$here/exploits.py" "$out/exploits.jsonl" --jobs 4 --seconds "$(($1 - 20))"; }
mutants() { python3 "$here/mutants.py" "$out/mutants.jsonl" --count 520 --jobs 8 --seconds "$(($1 - 15))"; }
soak() { python3 "$here/soak.py" "$out/soak.jsonl" --count 1000 --parts $((4 * (gpus > 0 ? gpus : 1))) --seconds "$(($1 - 15))"; }
cost() { python3 "$here/evaluation_cost.py" "$out/cost.jsonl" --specs 24 --jobs 6 --seconds "$(($1 - 15))"; }
stability() { python3 "$here/timing_stability.py" "$out/stability.jsonl" --seconds "$(($1 - 15))"; }

mkdir -p "$out"
. "$here/in_turn.sh"
in_turn 20
