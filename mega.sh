#!/usr/bin/env bash
# One script from a bare Debian to a training run or a tested tree: see usage below.
set -euo pipefail

CALLED_FROM=$PWD
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'TEXT'
usage: ./mega.sh VERB

  train [MODEL] [ARGUMENT...]         set up, build and run the trainer of gpt3 (the default),
                                      llama3, or on NVIDIA GPUs gpt3-cuda or llama3-cuda.
                                      Arguments go to the program: --data FILE|DIR|x.jsonl, --help
  test                                set up, build and run every test; those of GPUs are compiled
                                      where nvcc is, and run where GPUs are
  build                               set up and build the programs, into build/bin
  help                                print this

Missing Debian packages are installed with apt-get, with sudo where you are not root.
TEXT
}

# What each verb needs, by Debian package. Where a program is named behind a colon, one that was
# installed in another way will do.
BUILD_PACKAGES=(g++:g++ cmake:cmake ninja-build:ninja)
TRAIN_PACKAGES=("${BUILD_PACKAGES[@]}" libcli11-dev nlohmann-json3-dev libxxhash-dev libopenblas-dev)
PROGRAM_PACKAGES=("${TRAIN_PACKAGES[@]}" libopenmpi-dev openmpi-bin:mpirun zlib1g-dev libprotozero-dev)
TEST_PACKAGES=("${PROGRAM_PACKAGES[@]}" doctest-dev librange-v3-dev libbenchmark-dev python3:python3
               clang-format-14:clang-format binutils:objdump procps:ps)

# The demonstration: 8 ranks as threads, or one GPU, on the licence texts of this machine unless
# --data is given, then a validation, a checkpoint and a sampled continuation. The user's arguments
# come after.
demo_arguments() {
  DEMO_ARGUMENTS=(--train-iters 600 --lr-warmup-iters 20 --sample-tokens 200
                  --save "$ROOT/build/checkpoints/$1-$(date +%Y%m%d-%H%M%S)")
  [[ $1 == *-cuda ]] || DEMO_ARGUMENTS+=(--tp 2 --pp 2 --dp 2)
}

# Whether nvcc is here; then CMake finds it, too.
find_nvcc() {
  local nvcc
  nvcc=$(command -v "${CUDACXX:-nvcc}" || command -v /usr/local/cuda/bin/nvcc) || return 1
  export CUDACXX=$nvcc
}

say() { printf '\n== %s\n' "$*" >&2; }
die() {
  printf 'mega.sh: %s\n' "$1" >&2
  exit "${2:-2}"
}

# installed PACKAGE[:PROGRAM]
installed() {
  local package=${1%%:*} program=""
  [[ $1 == *:* ]] && program=${1#*:}
  if [[ -n $program ]] && command -v "$program" >/dev/null; then return 0; fi
  [[ "$(dpkg-query -W -f='${db:Status-Abbrev}' "$package" 2>/dev/null)" == ii* ]]
}

# install_missing PACKAGE...: does nothing, and asks for no rights, when all are there.
install_missing() {
  local missing=() entry sudo=()
  for entry in "$@"; do
    installed "$entry" || missing+=("${entry%%:*}")
  done
  if ((${#missing[@]} == 0)); then return 0; fi
  command -v apt-get >/dev/null ||
    die "this machine has no apt-get; install what corresponds to Debian's ${missing[*]}."
  if ((EUID != 0)); then
    command -v sudo >/dev/null ||
      die "not root and no sudo; have an administrator run: apt-get install ${missing[*]}"
    sudo=(sudo)
  fi
  say "installing ${missing[*]}"
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q update >&2 ||
    die "apt-get update failed; its message is above." 1
  "${sudo[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -q -y --no-install-recommends \
    -o DPkg::Lock::Timeout=300 install "${missing[@]}" >&2 ||
    die "apt-get install failed; its message is above." 1
}

# configure PRESET [OPTION...]
configure() {
  local preset=$1 launcher=()
  shift
  if command -v ccache >/dev/null; then launcher=(-D CMAKE_CXX_COMPILER_LAUNCHER=ccache); fi
  say "configuring $preset"
  cmake --preset "$preset" "${launcher[@]}" "$@" >&2
}

# build PRESET TARGET...
build() {
  local preset=$1
  shift
  say "building $preset: $*"
  cmake --build --preset "$preset" --parallel "$(nproc)" --target "$@" >&2
}

# configure_programs PRESET FOLDER: a first configuration asks for no test package; a later one keeps
# what is there.
configure_programs() {
  local options=()
  if [[ ! -f $2/CMakeCache.txt ]]; then options=(-D MEGA_BUILD_TESTS=OFF); fi
  # CMake asks the GPU for its architecture; without one, for that of an H100 or H200.
  if [[ $1 == cuda ]] && ! nvidia-smi -L >/dev/null 2>&1; then
    options+=(-D CMAKE_CUDA_ARCHITECTURES=90)
  fi
  configure "$1" "${options[@]}"
}

train() {
  local model=gpt3 preset=release folder=build
  case ${1:-} in
    gpt3 | llama3 | gpt3-cuda | llama3-cuda)
      model=$1
      shift
      ;;
    "" | -*) ;;
    *) die "unknown model $1; train takes gpt3, llama3, gpt3-cuda or llama3-cuda, then the program's arguments." ;;
  esac
  if [[ $model == *-cuda ]]; then
    find_nvcc ||
      die "$model needs nvcc, which is neither in PATH nor in /usr/local/cuda/bin; install NVIDIA's CUDA toolkit 13, with NCCL for several GPUs and cuDNN for its attention, or train ${model%-cuda} on the processor."
    preset=cuda folder=build-cuda
  fi
  install_missing "${TRAIN_PACKAGES[@]}"
  configure_programs "$preset" "$folder"
  build "$preset" "mega-$model"
  say "training $model"
  demo_arguments "$model"
  cd "$CALLED_FROM"  # where the user's relative paths begin
  exec "$ROOT/$folder/bin/mega-$model" "${DEMO_ARGUMENTS[@]}" "$@"
}

build_programs() {
  install_missing "${PROGRAM_PACKAGES[@]}"
  configure_programs release build
  build release programs
  say "the programs are in build/bin"
}

# Cheap checks first; the first stage that fails ends the run.
run_tests() {
  install_missing "${TEST_PACKAGES[@]}"
  local options=(-D MEGA_BUILD_TESTS=ON -D MEGA_WERROR=ON -D MEGA_REQUIRE_PACKAGES=ON
                 -D MEGA_COMBINE=ON)
  configure release "${options[@]}" -D MEGA_BUILD_BENCHMARKS=ON
  say "checking the sources"
  ctest --preset release -L source
  build release all
  say "testing"
  ctest --preset release --parallel "$(nproc)"
  local sanitizer
  for sanitizer in asan tsan; do
    configure "$sanitizer" "${options[@]}"
    build "$sanitizer" sanitized_tests
    say "testing under $sanitizer"
    ctest --preset "$sanitizer" --parallel "$(nproc)"
  done
  if find_nvcc; then
    configure cuda-check "${options[@]}" -D MEGA_REQUIRE_PACKAGES=OFF
    build cuda-check cuda_programs
    say "testing what was built with nvcc"
    ctest --preset cuda-check
  else
    say "nvcc is not here, so nothing of CUDA was compiled"
  fi
}

main() {
  local verb=${1:-help}
  cd "$ROOT"
  (($# > 0)) && shift
  case $verb in
    train) train "$@" ;;
    test | build)
      (($# == 0)) || die "$verb takes no arguments, and got: $*"
      if [[ $verb == test ]]; then run_tests; else build_programs; fi
      ;;
    help | -h | --help) usage ;;
    *) die "unknown verb $verb; the verbs are train, test, build and help." ;;
  esac
}

main "$@"
