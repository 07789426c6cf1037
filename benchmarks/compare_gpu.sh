#!/usr/bin/env bash
# Runs a peer and bench_gpu_step in turn on the same GPUs and prints their ratio for each workload.
#
#   benchmarks/compare_gpu.sh [--repeats N] [--limit SECONDS] [--steps N] [--list] [WORKLOAD...]
#
#   WORKLOAD   default: those of one GPU that have a peer; --list names all of them
#   --repeats  runs of each program, one after the other; the median counts; default 1
#   --limit    seconds after which a run is killed; default 300
#   --steps    timed steps of a run; default 12
# Environment:
#   PEER       PyTorch program of the user's own, see below; default none: only ours runs
#   PYTHON     default python3
#   GPU_STEP   default build-cuda/bin/bench_gpu_step below the root of the tree, which the preset
#              cuda builds
#   GPU_STEP_FLAGS  more flags for ours; default --tune
#   TUNED      file that keeps the algorithms of matrix products between our runs; default none
#   OUT        where compare_gpu.log goes, with every line that the programs print; default here
#
# A peer trains the model of that name, on random tokens, and takes: --model NAME, --seq T,
# --micro-batch B, --steps N and --sdpa flash|cudnn|default; for workloads of several GPUs also
# --parallel ddp|fsdp|pp, --num-micro K, --split LAYERS,LAYERS and --schedule 1F1B, and then
# torch.distributed.run starts it, one process a GPU. It prints one line
#   peer=NAME ... tokens_per_s=NUMBER ... peak_gib=NUMBER ...
# whose tokens are those of all GPUs, and ends with 0. It is to wait for its GPU after every step, so
# ours reads its loss after every step. Exit code 0: every run that was wanted has given its line.
set -uo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
python=${PYTHON:-python3}
gpu_step=${GPU_STEP:-$root/build-cuda/bin/bench_gpu_step}
read -ra more_flags <<<"${GPU_STEP_FLAGS---tune}"
repeats=1 limit=300 steps=12
log=$(realpath "${OUT:-.}")/compare_gpu.log

# NAME GPUS | options of both | of the peer, - for none | of ours. The peer's attention is the one
# that is fastest for the workload.
workloads=(
  "gpt3-125m 1|--model gpt3-125m --seq 2048 --micro-batch 16|--sdpa flash|"
  "gpt3-1.3b 1|--model gpt3-1.3b --seq 2048 --micro-batch 8|--sdpa default|"
  "llama3-1b 1|--model llama3-1b --seq 4096 --micro-batch 4|--sdpa cudnn|"
  "gpt3-1.3b-dp2 2|--model gpt3-1.3b --seq 2048 --micro-batch 8|--parallel ddp --sdpa default|--dp 2 --zero1"
  "gpt3-1.3b-tp2 2|--model gpt3-1.3b --seq 2048 --micro-batch 8|-|--tp 2 --sequence-parallel"
  "gpt3-1.3b-pp2 2|--model gpt3-1.3b --seq 2048 --micro-batch 2 --num-micro 8 --split 13,11|--parallel pp --schedule 1F1B|--pp 2 --schedule zb-h1"
  "llama3-1b-pp2 2|--model llama3-1b --seq 4096 --micro-batch 1 --num-micro 8 --split 10,6|--parallel pp --schedule 1F1B|--pp 2 --schedule zb-h1"
  "llama3-8b-2gpu 2|--model llama3-8b --seq 8192 --micro-batch 1|--parallel fsdp --sdpa cudnn|--dp 2 --zero1 --recompute selective"
)
default_workloads=(gpt3-125m gpt3-1.3b llama3-1b)

usage() { sed -n '2,/^set /{/^set /d;s/^# \{0,1\}//;p}' "${BASH_SOURCE[0]}"; }
die() {
  printf 'compare_gpu.sh: %s\n' "$1" >&2
  exit 2
}
positive() { [[ $2 =~ ^[1-9][0-9]*$ ]] || die "$1 is '$2'; it takes a whole number from 1 on"; }

chosen=()
while (($#)); do
  case $1 in
    --repeats | --limit | --steps)
      (($# > 1)) || die "$1 takes a number"
      positive "$1" "$2"
      declare "${1#--}=$2"
      shift
      ;;
    --list)
      for w in "${workloads[@]}"; do printf '%s\n' "${w%%|*}"; done
      exit 0
      ;;
    -h | --help)
      usage
      exit 0
      ;;
    -*) die "unknown option $1; --help lists them" ;;
    *) chosen+=("$1") ;;
  esac
  shift
done
((${#chosen[@]})) || chosen=("${default_workloads[@]}")

# find_workload NAME: its line
find_workload() {
  local w
  for w in "${workloads[@]}"; do
    [[ ${w%% *} == "$1" ]] && printf '%s' "$w" && return
  done
  return 1
}
for name in "${chosen[@]}"; do
  find_workload "$name" >/dev/null || die "there is no workload $name; --list names them"
done
[[ -x $gpu_step ]] || die "$gpu_step is no program; build the preset cuda, or set GPU_STEP"
if [[ -z ${PEER:-} ]]; then
  echo "PEER is not set, so no peer runs beside ours and there are no ratios."
elif [[ ! -f $PEER ]]; then
  die "PEER is $PEER, which is no file"
fi

# kill_tree PID: with all that it has started, also what it has given sessions of their own
kill_tree() {
  local child
  for child in $(pgrep -P "$1"); do kill_tree "$child"; done
  kill -KILL "$1" 2>/dev/null
}

# run WHO COMMAND...: adds the line that the command prints to the file WHO, and says what failed.
# Peers that wait for each other behind their line, as torch.distributed can for minutes, are ended.
failures=0
run() {
  local who=$1 status line pid end said="" ended=""
  shift
  printf '$ %s\n' "$*" >>"$log"
  "$@" >"$work/output" 2>&1 &
  pid=$! end=$((SECONDS + limit))
  while [[ -z $ended ]] && kill -0 "$pid" 2>/dev/null; do
    if [[ -z $said ]] && grep -q '^peer=' "$work/output"; then
      said=yes
      ((end > SECONDS + 10)) && end=$((SECONDS + 10))
    fi
    if ((SECONDS >= end)); then
      kill_tree "$pid"
      ended=${said:-late}
    fi
    sleep 0.2
  done
  wait "$pid" 2>/dev/null
  status=$?
  [[ $ended == late ]] && status=124
  [[ $ended == yes ]] && status=0
  cat "$work/output" >>"$log"
  line=$(grep -m1 '^peer=' "$work/output")
  if [[ $status != 0 || -z $line ]]; then
    ((failures += 1))
    if [[ $status == 124 ]]; then
      echo "$who of $name was killed after $limit s" >&2
    else
      echo "$who of $name failed with code $status: $(tail -1 "$work/output")" >&2
    fi
    return
  fi
  printf '%s\n' "$line" >&2
  printf '%s\n' "$line" >>"$work/$who"
}

# median FILE KEY: of the values of KEY=VALUE in the lines of FILE; a dash where there is none
median() {
  [[ -s $1 ]] || {
    printf -- '-'
    return
  }
  sed -n "s/.* $2=\([^ ]*\).*/\1/p" "$1" | sort -g | awk '{v[NR] = $1} END {print v[int(NR / 2) + 1]}'
}
ratio() {
  if [[ $1 == - || $2 == - ]]; then
    printf -- '-'
  else
    awk -v a="$1" -v b="$2" 'BEGIN {printf "%.3f", a / b}'
  fi
}

work=$(mktemp -d) || exit 2
trap 'rm -rf "$work"' EXIT
: >"$log" || exit 2
table=()
for name in "${chosen[@]}"; do
  IFS='|' read -r head both peers ours <<<"$(find_workload "$name")"
  gpus=${head##* }
  rm -f "$work/peer" "$work/ours"
  # shellcheck disable=SC2206 # flags hold no blanks
  common=($both --steps "$steps") peer_flags=($peers) our_flags=($ours "${more_flags[@]}" --result-every 1)
  [[ -n ${TUNED:-} ]] && our_flags+=(--tuned "$TUNED")
  for ((i = 0; i < repeats; ++i)); do
    if [[ -n ${PEER:-} && $peers != - ]]; then
      if ((gpus == 1)); then
        run peer "$python" "$PEER" "${common[@]}" "${peer_flags[@]}"
      else
        run peer "$python" -m torch.distributed.run --standalone --nproc-per-node "$gpus" "$PEER" \
          "${common[@]}" "${peer_flags[@]}"
      fi
    fi
    # A module loaded late may wait for a GPU on which a collective waits for this very rank.
    loading=LAZY
    ((gpus > 1)) && loading=EAGER
    run ours env CUDA_MODULE_LOADING="$loading" "$gpu_step" "${common[@]}" "${our_flags[@]}"
  done
  theirs=$(median "$work/peer" tokens_per_s) mine=$(median "$work/ours" tokens_per_s)
  [[ $name == gpt3-1.3b ]] && one_gpu=$mine
  scaling=-
  [[ $name == gpt3-1.3b-* ]] && scaling=$(ratio "$mine" "${one_gpu:--}")
  table+=("| $name | $theirs | $mine | $(ratio "$mine" "$theirs") | $scaling | $(
    median "$work/ours" tflops_per_gpu) | $(median "$work/ours" mfu) | $(
    median "$work/peer" peak_gib) | $(median "$work/ours" peak_gib) | $repeats |")
done

{
  echo "$(date -u +%Y-%m-%d), $(nvidia-smi --query-gpu=name,driver_version --format=csv,noheader 2>/dev/null | head -1)"
  echo "| workload | peer tok/s | ours tok/s | ours / peer | ours / ours on 1 GPU | TFLOP/s a GPU | MFU | peer GiB | ours GiB | runs |"
  echo "|---|---|---|---|---|---|---|---|---|---|"
  printf '%s\n' "${table[@]}"
} | tee -a "$log"
((failures == 0))
