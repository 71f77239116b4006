#!/bin/bash
# Builds the Hopper kernels into one shared library: build_sm90.sh OUTPUT.so [nvcc flags].
# Fails on the compiler's notes that a kernel lost its register reallocation or its asynchrony, and
# when a steady loop of attention waits for its products before it has taken its exponentials.
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

# Between the wait for a tile's scores (all but one product) and the wait for the product before it
# (all) stand the tile's 64 exponentials: what never() in sm90_attention.cuh is for. Independent
# warpgroups (mapping 2) mix them on purpose.
cuobjdump -sass "$output" | awk '
  /Function :/ { name = $3; checked = name ~ /attention_kernel/ && name !~ /RowMappingE2/; open = 0 }
  !checked { next }
  /MUFU.EX2/ { exponentials++ }
  /WARPGROUP.DEPBAR.LE gsb0, 0x1/ { open = 1; exponentials = 0 }
  /WARPGROUP.DEPBAR.LE gsb0, 0x0/ && open {
    open = 0
    loops++
    if (exponentials < 64) { print name ": waits before its exponentials"; failed = 1 }
  }
  END {
    if (loops == 0) { print "no steady loop of attention found"; failed = 1 }
    exit failed
  }'
