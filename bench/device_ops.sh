#!/bin/bash
# Runs bench/device_ops of a build and keeps its lines: bench/device_ops.sh BUILD_DIR [name part ...]
set -euo pipefail
build=${1:?usage: bench/device_ops.sh BUILD_DIR [name part ...]}
shift
here=$(cd "$(dirname "$0")" && pwd)
ORRERY_COMMIT=$(git -C "$here" rev-parse --short HEAD) "$build/device_ops" "$@" | tee "$here/results/device_ops.jsonl"
