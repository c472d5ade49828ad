#!/usr/bin/env bash
# This CPU in the forms of lesser ones: other vectors, other orders of summation, other kernels.
# Runs the parts of the suite whose claims hang on sums once in each form.
#   tests/other_cpus.sh PYTHON [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
parts=(tests/models tests/kernels
  tests/speculation/test_sampling_distribution.py tests/speculation/test_verify_distribution.py
  tests/engine/test_greedy_equals_plain.py tests/engine/test_independence.py
  tests/engine/test_cache_after_rejection.py tests/engine/test_kv_cache.py tests/engine/test_trees.py
  --ignore=tests/kernels/gpu --ignore=tests/kernels/cpu/test_library.py
  --ignore=tests/models/test_masks.py --ignore=tests/models/test_ngram.py)
options=("$@")
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT

# Two threads are what `make test` runs on; tests of the kernels choose their own number. Forms run
# two at a time instead.
export OMP_NUM_THREADS=1

in_form() { # NAME=value ...
  echo "--- $*"
  env "$@" "$python" -m pytest -q -p no:cacheprovider -m "not network" "${parts[@]}" \
    ${options[@]+"${options[@]}"}
}

both() { # waits for the two forms in the background, and shows what they said
  local failed=0
  wait "$1" || failed=1
  wait "$2" || failed=1
  cat "$scratch/first" "$scratch/second"
  return "$failed"
}

on_x86() {
  if [ "$(uname -m)" = x86_64 ]; then echo "$1"; fi
}

# No vectors beyond the oldest, and no C compiler to be found.
in_form ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 \
  CC=/nowhere/cc PEAGLE_CACHE="$scratch/cache" >"$scratch/first" 2>&1 &
first=$!
# AVX2 and no more, as most CPUs have it.
in_form ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
  PEAGLE_CFLAGS="$(on_x86 -mno-avx512f)" >"$scratch/second" 2>&1 &
both "$first" $!

# All that this CPU has, beside kernels for any of its kind: no AVX, and products rounded before
# they are added.
in_form PEAGLE_CFLAGS="$(on_x86 -march=x86-64)" >"$scratch/first" 2>&1 &
first=$!
# All that this CPU has, without our kernels.
in_form PEAGLE_CPU_KERNELS=0 >"$scratch/second" 2>&1 &
both "$first" $!
