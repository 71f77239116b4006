#!/bin/bash
# Runs the device tests and benchmarks of a build on a machine with a GPU:
#   tests/device/run_device_tests.sh BUILD_DIR [LOG_DIR]
# BUILD_DIR holds device_test and, if built, device_ops; it may come from another machine. Suites run side by
# side in processes of their own, since a fault on the device ends its process; compute-sanitizer, where it is
# installed, watches the small cases of our own kernels; the benchmark runs alone at the end. Exit status 1 when
# anything failed.
set -u
build=${1:?usage: run_device_tests.sh BUILD_DIR [LOG_DIR]}
logs=${2:-$(mktemp -d)}
mkdir -p "$logs"

# cuBLASLt and cuDNN may be there only as Python packages.
packages=$(python3 -c 'import nvidia; print(list(nvidia.__path__)[0])' 2>/dev/null)
if [ -n "$packages" ]; then
  export LD_LIBRARY_PATH="$(ls -d "$packages"/*/lib 2>/dev/null | tr '\n' ':')${LD_LIBRARY_PATH:-}"
fi

declare -A jobs
start() { # name, command...
  local name=$1
  shift
  timeout "${ORRERY_TEST_TIMEOUT:-150}" "$@" >"$logs/$name.log" 2>&1 &
  jobs[$name]=$!
}
for suite in Elementwise Linear Norms Attention SelectBlocks Convolution; do
  start "$suite" "$build/device_test" --gtest_brief=1 --gtest_filter="*/$suite.*/cuda"
done
start Device "$build/device_test" --gtest_brief=1 --gtest_filter='Device.*'
start Strategies "$build/device_test" --gtest_brief=1 --gtest_filter='Strategies.*'
if command -v compute-sanitizer >/dev/null; then
  # The tests fetch whole block lists, whose ends nobody writes: only what kernels read counts.
  for tool in memcheck racecheck "initcheck --check-api-memory-access no" synccheck; do
    start "${tool%% *}" compute-sanitizer --tool $tool --error-exitcode 9 "$build/device_test" --gtest_brief=1 \
      --gtest_filter='*/Elementwise.*/cuda:*/Norms.HeadNorm*/cuda:*/Norms.EveryKind/cuda:*/SelectBlocks.*/cuda:*/Attention.RowsWithoutKeys*/cuda:*/Attention.UnselectedBlocks*/cuda:*/Convolution.Transposed/cuda:*/Convolution.ResidualMay*/cuda'
  done
fi
failed=0
for name in "${!jobs[@]}"; do
  if wait "${jobs[$name]}"; then
    echo "ok      $name: $(grep -E 'PASSED|ERROR SUMMARY' "$logs/$name.log" | tail -1)"
  else
    echo "FAILED  $name (status $?)"
    grep -E -A6 'Failure|unknown file|ERROR|Error|Invalid|what\(\)' "$logs/$name.log" | head -${ORRERY_FAILURE_LINES:-40}
    grep 'FAILED' "$logs/$name.log" | sort -u | head -20
    failed=1
  fi
done
if [ -x "$build/device_ops" ]; then
  export ORRERY_COMMIT="${ORRERY_COMMIT:-$(git rev-parse --short HEAD 2>/dev/null || echo unknown)}"
  timeout "${ORRERY_TEST_TIMEOUT:-150}" "$build/device_ops" >"$logs/device_ops.jsonl" 2>"$logs/device_ops.log" || failed=1
  python3 - "$logs/device_ops.jsonl" <<'PY'
import json, sys
for line in open(sys.argv[1]):
    r = json.loads(line)
    if "error" in r:
        print(f"{r['case'][:58]:58} {r['error'][:160]}")
    else:
        floor = f"floor {r['floor']:.4g}" if r["floor"] else ""
        peer = f"{r['peer']} {r['peer_value']:.4g}, ratio {r['ratio']:.3f}" if r["peer"] else ""
        print(f"{r['case'][:58]:58} {r['value']:10.4g} {r['unit']:8} {floor:16} {r['note']} {peer}")
PY
  tail -3 "$logs/device_ops.log"
fi
exit $failed
