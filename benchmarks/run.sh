#!/usr/bin/env bash
# The runs whose rows lie in results/: all KernelBench problems of levels 1 and 2 that the template coder has a family for.
#   benchmarks/run.sh KERNELBENCH OUT SECONDS NAME [NAME ...]
# NAME is default, high, bf16, modes (torch.compile's others), or a planner of the ablation: lower-only, sweep, random; the last five take 20 problems.
# All together take at most SECONDS: a run is skipped where no time is left, and goes on where it ended when it is started again with the same OUT.
set -euo pipefail
root=$1 out=$2 end=$((SECONDS + $3))
shift 3
families=pointwise,reduction,gemm
some="1/1,4,8,12,17,23,26,36,40,47,95;2/12,28,37,45,59,64,75,88,99" # of each family, small and large
for name in "$@"; do
    left=$((end - SECONDS))
    options=(--root "$root" --seconds-each 35 --total-seconds "$left" --overhead-seconds 40 --jobs 3 --out "$out/$name.jsonl")
    [ "$left" -gt 40 ] || break
    case $name in
    default) options+=(--level 1,2 --families $families) ;;
    high) options+=(--level 1,2 --families gemm --mode high) ;;
    bf16) options+=(--level 1,2 --problems "$some" --dtype bfloat16) ;;
    modes) options+=(--level 1,2 --problems "$some" --compile-modes default,reduce-overhead,max-autotune-no-cudagraphs) ;;
    *) options+=(--level 1,2 --problems "$some" --planner "$name" --no-compile-baseline) ;;
    esac
    python3 -m qimeng.cli bench kernelbench "${options[@]}"
done
