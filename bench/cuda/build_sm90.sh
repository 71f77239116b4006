#!/bin/bash
# Builds the Hopper kernels into one shared library: build_sm90.sh OUTPUT.so [nvcc flags].
# Fails on the compiler's notes that a kernel lost its register reallocation or its asynchrony.
set -euo pipefail
root=$(cd "$(dirname "$0")/../.." && pwd)
output=$1
shift
objects=$(mktemp -d)
trap 'rm -rf "$objects"' EXIT
flags=(-std=c++20 -O3 -lineinfo -I "$root/src" -gencode "arch=compute_90a,code=sm_90a"
       -Xptxas -v -Xcompiler -fPIC,-fno-gnu-unique "$@")
sources=(src/cuda/kernels/sm90_attention.cu src/cuda/kernels/sm90_attention_dense.cu
         src/cuda/kernels/sm90_attention_sparse.cu src/cuda/kernels/sm90_select.cu
         src/cuda/kernels/sm90_conv.cu src/cuda/kernels/sm90_gate.cu
         src/cuda/kernels/sm90_host.cu
         bench/cuda/sm90_shim.cu)
pids=()
for source in "${sources[@]}"; do
  name=$(basename "$source" .cu)
  nice nvcc "${flags[@]}" -c "$root/$source" -o "$objects/$name.o" 2> "$objects/$name.log" &
  pids+=($!)
done
failed=0
for pid in "${pids[@]}"; do wait "$pid" || failed=1; done
if [ $failed = 1 ] || grep -hE "C75(08|11|12|17)" "$objects"/*.log; then
  grep -vhE "ptxas info" "$objects"/*.log || true
  exit 1
fi
if [ -n "${VERBOSE:-}" ]; then
  grep -hE "Compiling entry|registers|spill" "$objects"/*.log
fi
nvcc -shared -o "$output" "$objects"/*.o
