#!/bin/sh
# Starts fault_rank with each fault and checks that the run ends in time, with the right exit code,
# and that the other ranks name the rank, the operation and its number.
# usage: faults.sh FAULT_RANK [MPIRUN...]
set -u
program=$1
shift
[ $# -gt 0 ] || set -- mpirun --allow-run-as-root --oversubscribe
failures=0
start_ms=0 # how long a run without a fault takes here
output=$(mktemp)
trap 'rm -f "$output"' EXIT

# An EXIT_CODE of any is for runs whose exit code mpirun decides.
# SECONDS is the limit beyond the time of a run without a fault: start-up depends on the machine.
# expect FAULT EXIT_CODE SECONDS MINIMUM_OF_LINES PATTERN [mpirun option...]
expect() {
  fault=$1 code=$2 limit=$((start_ms + $3 * 1000)) lines=$4 pattern=$5
  shift 5
  begin=$(date +%s%N)
  timeout -k 5 60 "$@" -np 4 "$program" "$fault" 1 >"$output" 2>&1
  status=$?
  ms=$((($(date +%s%N) - begin) / 1000000))
  found=$(grep -Ec "$pattern" "$output")
  [ "$code" = any ] && code=$status
  if [ "$status" -eq "$code" ] && [ "$ms" -le "$limit" ] && [ "$found" -ge "$lines" ]; then
    echo "ok      $fault: exit code $status after $ms ms, $found ranks say so"
  else
    echo "FAILED  $fault: exit code $status (expected $code) after $ms ms (limit $limit ms)," \
      "$found lines (expected $lines) match $pattern"
    sed 's/^/        /' "$output"
    failures=$((failures + 1))
  fi
}

absent='rank [013]: .*all_reduce\(max\) #41 with 50000 float.*rank 2 did not arrive within 1 s'
expect none 0 30 4 '^done$' "$@"
start_ms=$ms
expect throw 3 4 3 '^rank [013]: rank 2 failed: disk full$' "$@"
expect usage 2 4 1 '^rank 2: steps must be positive, not 0$' "$@"
expect stall 3 4 3 "$absent" "$@"
expect count 3 4 4 \
  'ranks 0,1,3 called all_reduce\(max\) #41 with 50000 float, rank 2 .* #41 with 50001 float$' "$@"
expect swap 3 4 4 'ranks 0,1,3 called all_reduce\(max\) #41 .*, rank 2 called barrier #41$' "$@"
expect leave 3 4 4 'ranks 0,1,3 called all_reduce\(max\) #41 .*, rank 2 called barrier #41$' "$@"
expect message_size 3 4 2 \
  '^rank [02]: channel 5 from rank 2 to rank 0: message #2 has 64 bytes, its slot has 32$' "$@"
expect message_missing 3 4 3 \
  'receive #2 on channel 5 from rank 2 to rank 0: rank 2 sent no message within 1 s|barrier #81' "$@"
expect stop 3 8 3 "$absent" "$@"
# mpirun ends the run by itself when a process is killed; with recovery the ranks are on their own.
expect kill any 4 1 'rank 2 .*exited on signal 9' "$@"
expect kill any 4 3 "$absent" "$@" --enable-recovery
exit "$((failures > 0))"
