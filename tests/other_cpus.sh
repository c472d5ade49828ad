#!/usr/bin/env bash
# This CPU in the forms of lesser ones: other vectors, other orders of summation, other kernels.
# Runs the parts of the suite whose claims hang on sums once in each form.
#   tests/other_cpus.sh PYTHON [arguments of pytest]
set -euo pipefail
cd "$(dirname "$0")/.."

python=$1
shift
parts=(tests/models tests/kernels tests/speculation tests/engine
  --ignore=tests/kernels/gpu --ignore=tests/kernels/test_compiling.py
  --ignore=tests/engine/gpu --ignore=tests/engine/lanes)
options=("$@")
empty_cache=$(mktemp -d)
trap 'rm -rf "$empty_cache"' EXIT

# Two threads are what `make test` runs on; tests of the kernels choose their own number.
export OMP_NUM_THREADS=1

in_form() { # NAME=value ...
  echo "--- $*"
  env "$@" "$python" -m pytest -q -m "not network" "${parts[@]}" ${options[@]+"${options[@]}"}
}

on_x86() {
  if [ "$(uname -m)" = x86_64 ]; then echo "$1"; fi
}

# No vectors beyond the oldest, and no C compiler to be found.
in_form ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE ONEDNN_MAX_CPU_ISA=SSE41 \
  CC=/nowhere/cc PEAGLE_CACHE="$empty_cache"

# AVX2 and no more, as most CPUs have it.
in_form ATEN_CPU_CAPABILITY=avx2 MKL_CBWR=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2 ONEDNN_MAX_CPU_ISA=AVX2 \
  PEAGLE_CFLAGS="$(on_x86 -mno-avx512f)"

# All that this CPU has, beside kernels for any of its kind: no AVX, and products rounded before
# they are added.
in_form PEAGLE_CFLAGS="$(on_x86 -march=x86-64)"

# All that this CPU has, without our kernels.
in_form PEAGLE_CPU_KERNELS=0
