#!/usr/bin/env bash
# with_gpus.sh COUNT COMMAND...: runs the command where at least COUNT NVIDIA GPUs are, else ends with
# 77, which ctest reports as skipped.
set -euo pipefail
wanted=$1
shift
found=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU' || true)
if ((found < wanted)); then
  echo "needs $wanted NVIDIA GPUs, and there are $found"
  exit 77
fi
exec "$@"
