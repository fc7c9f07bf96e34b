# Sourced by benchmarks of several parts: runs the functions in `names` one after the other until `end` (of SECONDS).
# What is left of the time is shared out by `weight` among those that are left; each gets its seconds as its argument.
#   in_turn LEAST     a part with fewer than LEAST seconds is left out; fails where one failed
in_turn() {
    local total=0 failed=0 name left seconds
    for name in "${names[@]}"; do total=$((total + ${weight[$name]:?unknown: $name})); done
    for name in "${names[@]}"; do
        left=$((end - SECONDS))
        seconds=$((left * weight[$name] / total))
        total=$((total - weight[$name]))
        [ "$seconds" -gt "$1" ] || continue
        echo "== $name, $seconds s"
        trap 'end=0; kill $(jobs -p) 2>/dev/null' TERM INT
        "$name" "$seconds" || { echo "$name: failed" && failed=1; }
    done
    return $failed
}
