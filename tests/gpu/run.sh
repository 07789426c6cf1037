#!/usr/bin/env bash
# Builds the GPU tests with nvcc alone and runs them: for a machine with an NVIDIA GPU and the CUDA
# toolkit, but without CMake or packages.
#
#   MEGA_DEPS=FOLDER tests/gpu/run.sh [TESTS...]
#
#   TESTS            folders of tests or single ones, default tests/gpu and tests/gpu_cudnn;
#                    tests/gpu2 needs two GPUs and NCCL
#   MEGA_DEPS        where Debian's doctest-dev, nlohmann-json3-dev and libxxhash-dev are unpacked
#                    (dpkg -x); default: none, they are installed
#   MEGA_ARCH        architecture to build for, default sm_90
#   MEGA_SANITIZERS  tools of compute-sanitizer that run the tests of the operations, of attention
#                    and of graphs, but not their timings; default memcheck, "" for none
#   MEGA_TIMEOUT     seconds after which a program is killed, default 300
#   OUT              where the logs go, default the current folder
# Exit code 0: everything built, and every test passed.
set -uo pipefail
out=$(realpath "${OUT:-.}")
cd "$(dirname "$0")/../.." || exit 2
build=$(mktemp -d) || exit 2
trap 'rm -rf "$build"' EXIT
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
arch=${MEGA_ARCH:-sm_90}
tests=("$@")
((${#tests[@]})) || tests=(tests/gpu tests/gpu_cudnn)
sanitizers=${MEGA_SANITIZERS-memcheck}
log=$out/gpu_tests.log
: >"$log"

flags=(-std=c++20 -O2 -arch="$arch" -I include -I .)
[[ -n ${MEGA_DEPS:-} ]] && flags+=(-I "$MEGA_DEPS/usr/include")
libraries=()
# with_library NAME HEADER: links a library of the toolkit, or else that of a Python package.
with_library() {
  local name=$1 header=$2 wheel library
  libraries+=("-l$name")
  [[ -e $(dirname "$nvcc")/../include/$header || -e /usr/include/$header ]] && return
  wheel=$(python3 -c 'import nvidia, os, sys
for at in nvidia.__path__:
    for folder, _, files in os.walk(at):
        if sys.argv[1] in files: print(os.path.dirname(folder))' "$header" 2>/dev/null | head -1)
  flags+=(-I "$wheel/include")
  libraries+=(-L "$build" -Xlinker -rpath="$wheel/lib")
  for library in "$wheel/lib/lib$name"*.so.*; do
    ln -sf "$library" "$build/$(basename "${library%.so.*}").so"
  done
}
with_library cublas cublas_v2.h
with_library cublasLt cublasLt.h
if [[ ${tests[*]} == *cudnn* ]]; then
  with_library cudnn cudnn_graph.h
  flags+=(-DMEGA_WITH_CUDNN)
fi
# steady_state counts calls where the toolkit has CUPTI; the other programs do not load it.
toolkit=$(dirname "$nvcc")/..
cupti=$toolkit/extras/CUPTI
if [[ -e $toolkit/include/cupti.h || -e $cupti/include/cupti.h ]]; then
  flags+=(-I "$cupti/include")
  libraries+=(-L "$cupti/lib64" -Xlinker -rpath="$cupti/lib64" -Xlinker -rpath="$toolkit/lib64"
    -Xlinker --as-needed -lcupti -Xlinker --no-as-needed)
fi
if [[ ${tests[*]} == *gpu2* ]]; then
  with_library nccl nccl.h
  # A module loaded late may wait for a GPU on which a collective waits for this very rank.
  export CUDA_MODULE_LOADING=EAGER
fi

sources=()
for test in "${tests[@]}"; do
  if [[ -d $test ]]; then sources+=("$test"/*.test.cu); else sources+=("$test"); fi
done

begin=$SECONDS
declare -A compiling
for source in tests/support/doctest_main.cpp "${sources[@]}"; do
  object=$build/$(basename "$source").o
  "$nvcc" "${flags[@]}" -c "$source" -o "$object" >"$object.log" 2>&1 &
  compiling[$source]=$!
done
failed=0
for source in "${!compiling[@]}"; do
  wait "${compiling[$source]}" || { echo "does not compile: $source"; failed=1; }
  cat "$build/$(basename "$source").o.log" | tee -a "$log"
done
programs=()
for source in "${sources[@]}"; do
  name=$(basename "$source" .test.cu)
  programs+=("$name")
  "$nvcc" -arch="$arch" "$build/$name.test.cu.o" "$build/doctest_main.cpp.o" -o "$build/$name" \
    "${libraries[@]}" >>"$log" 2>&1 || { echo "does not link: $name"; failed=1; }
done
echo "built in $((SECONDS - begin)) s"

# run NAME COMMAND...: to the log and the screen; remembers a failure.
run() {
  local name=$1 start=$SECONDS
  shift
  echo "== $name" | tee -a "$log"
  timeout "${MEGA_TIMEOUT:-300}" "$@" 2>&1 | tee -a "$log" | tail -n 60 || failed=1
  echo "== $name: $((SECONDS - start)) s" | tee -a "$log"
}
for name in "${programs[@]}"; do
  [[ -x $build/$name ]] && run "$name" "$build/$name"
done
for tool in $sanitizers; do
  sanitizer=(compute-sanitizer --tool "$tool" --error-exitcode 9)
  provoked="provokes API errors"  # the test suite of that name
  for name in ops attention ops_bf16 attention_bf16 graphs; do
    [[ -x $build/$name ]] &&
      run "$tool of $name" "${sanitizer[@]}" "$build/$name" \
        --test-case-exclude="*rates of*,*speed of*" --test-suite-exclude="$provoked"
  done
  # What the tests provoke is no report, what kernels do is.
  quiet=()
  [[ $tool == memcheck ]] && quiet=(--report-api-errors no)
  [[ -x $build/graphs ]] &&
    run "$tool of graphs that $provoked" "${sanitizer[@]}" "${quiet[@]}" "$build/graphs" \
      --test-suite="$provoked"
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | tee -a "$log"
if [[ $failed == 0 ]]; then echo "GPU tests: passed"; else echo "GPU tests: FAILED"; fi
exit "$failed"
