#!/usr/bin/env bash
# Builds the GPU tests with nvcc alone and runs them: for a machine with an NVIDIA GPU and the CUDA
# toolkit, but without CMake or packages.
#
#   MEGA_DEPS=FOLDER tests/gpu/run.sh
#
#   MEGA_DEPS        where Debian's doctest-dev, nlohmann-json3-dev and libxxhash-dev are unpacked
#                    (dpkg -x); default: none, they are installed
#   MEGA_ARCH        architecture to build for, default sm_90
#   MEGA_SANITIZERS  tools of compute-sanitizer that run the tests of the operations and of
#                    attention; default memcheck, "" for none
#   OUT              where the logs go, default the current folder
# Exit code 0: everything built, and every test passed.
set -uo pipefail
out=$(realpath "${OUT:-.}")
cd "$(dirname "$0")/../.." || exit 2
build=$(mktemp -d) || exit 2
trap 'rm -rf "$build"' EXIT
nvcc=$(command -v nvcc || echo /usr/local/cuda/bin/nvcc)
arch=${MEGA_ARCH:-sm_90}
sanitizers=${MEGA_SANITIZERS-memcheck}
log=$out/gpu_tests.log
: >"$log"

flags=(-std=c++20 -O2 -arch="$arch" -I include -I .)
[[ -n ${MEGA_DEPS:-} ]] && flags+=(-I "$MEGA_DEPS/usr/include")
libraries=(-lcublas)
# A toolkit without cuBLAS beside a Python package that has it.
if [[ ! -e $(dirname "$nvcc")/../include/cublas_v2.h && ! -e /usr/include/cublas_v2.h ]]; then
  wheel=$(python3 -c 'import nvidia, os
for at in nvidia.__path__:
    for folder, _, files in os.walk(at):
        if "cublas_v2.h" in files: print(os.path.dirname(folder))' 2>/dev/null | head -1)
  flags+=(-I "$wheel/include")
  libraries=(-L "$build" -lcublas -Xlinker -rpath="$wheel/lib")
  for library in "$wheel"/lib/libcublas*.so.*; do
    ln -sf "$library" "$build/$(basename "${library%.so.*}").so"
  done
fi

begin=$SECONDS
declare -A compiling
for source in tests/support/doctest_main.cpp tests/gpu/*.test.cu; do
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
for source in tests/gpu/*.test.cu; do
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
  "$@" 2>&1 | tee -a "$log" | tail -n 60 || failed=1
  echo "== $name: $((SECONDS - start)) s" | tee -a "$log"
}
for name in "${programs[@]}"; do
  [[ -x $build/$name ]] && run "$name" "$build/$name"
done
for tool in $sanitizers; do
  for name in ops attention; do
    [[ -x $build/$name ]] &&
      run "$tool of $name" compute-sanitizer --tool "$tool" --error-exitcode 9 "$build/$name"
  done
done
nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | tee -a "$log"
if [[ $failed == 0 ]]; then echo "GPU tests: passed"; else echo "GPU tests: FAILED"; fi
exit "$failed"
