#!/usr/bin/env bash
# One script from a bare Debian to a training run or a tested tree: see usage below.
set -euo pipefail

CALLED_FROM=$PWD
ROOT=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)

usage() {
  cat <<'TEXT'
usage: ./mega.sh VERB

  train [gpt3|llama3] [ARGUMENT...]   set up, build and run the trainer; default gpt3. Arguments go
                                      to the program: --data FILE|DIR|x.jsonl, --help, ...
  test                                set up, build and run every test that needs no GPU
  build                               set up and build the programs, into build/bin
  help                                print this

Missing Debian packages are installed with apt-get, with sudo where you are not root.
TEXT
}

# What each verb needs, by Debian package. Where a program is named behind a colon, one that was
# installed in another way will do.
BUILD_PACKAGES=(g++:g++ cmake:cmake ninja-build:ninja)
TRAIN_PACKAGES=("${BUILD_PACKAGES[@]}" libcli11-dev nlohmann-json3-dev libxxhash-dev libopenblas-dev)
PROGRAM_PACKAGES=("${TRAIN_PACKAGES[@]}" libopenmpi-dev openmpi-bin:mpirun zlib1g-dev)
TEST_PACKAGES=("${PROGRAM_PACKAGES[@]}" doctest-dev librange-v3-dev libbenchmark-dev python3:python3
               clang-format-14:clang-format binutils:objdump)

# The demonstration: 8 ranks as threads, on the licence texts of this machine unless --data is given,
# then a validation, a checkpoint and a sampled continuation. The user's arguments come after.
demo_arguments() {
  DEMO_ARGUMENTS=(--tp 2 --pp 2 --dp 2 --train-iters 600 --lr-warmup-iters 20
                  --sample-tokens 200 --save "$ROOT/build/checkpoints/$1-$(date +%Y%m%d-%H%M%S)")
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

# A first configuration for programs asks for no test package; a later one keeps what is there.
configure_programs() {
  local options=()
  if [[ ! -f build/CMakeCache.txt ]]; then options=(-D MEGA_BUILD_TESTS=OFF); fi
  configure release "${options[@]}"
}

train() {
  local model=gpt3
  case ${1:-} in
    gpt3 | llama3)
      model=$1
      shift
      ;;
    "" | -*) ;;
    *) die "unknown model $1; train takes gpt3 or llama3, then the program's arguments." ;;
  esac
  install_missing "${TRAIN_PACKAGES[@]}"
  configure_programs
  build release "mega-$model"
  say "training $model"
  demo_arguments "$model"
  cd "$CALLED_FROM"  # where the user's relative paths begin
  exec "$ROOT/build/bin/mega-$model" "${DEMO_ARGUMENTS[@]}" "$@"
}

build_programs() {
  install_missing "${PROGRAM_PACKAGES[@]}"
  configure_programs
  build release programs
  say "the programs are in build/bin"
}

# Cheap checks first; the first stage that fails ends the run.
run_tests() {
  install_missing "${TEST_PACKAGES[@]}"
  local options=(-D MEGA_BUILD_TESTS=ON -D MEGA_WERROR=ON -D MEGA_REQUIRE_PACKAGES=ON)
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
