#!/bin/sh
# Builds the pump with ASan + UBSan and with TSan, and runs the stress test under each: sanitize.sh [SECONDS [SEED]]
set -e
seconds=${1:-20}
here=$(cd "$(dirname "$0")" && pwd)
for sanitizer in address,undefined thread; do
    build=$here/../../build/sanitize-$sanitizer
    cmake -S "$here/tests" -B "$build" -DP2PAVG_SANITIZE=$sanitizer >/dev/null
    cmake --build "$build" --parallel "$(nproc 2>/dev/null || echo 2)" >/dev/null
    echo "$sanitizer:"
    UBSAN_OPTIONS=print_stacktrace=1 "$build/stress" "$seconds" ${2:+"$2"}
done
