#!/usr/bin/env bash
# Names the C++ files that clang-format 14 would change. Other versions format differently, so without
# that one the check is skipped (exit code 77).
set -euo pipefail
cd "$(dirname "$0")/.."

formatter=""
for candidate in clang-format-14 clang-format; do
  if command -v "$candidate" >/dev/null && "$candidate" --version | grep -q 'version 14\.'; then
    formatter=$candidate
    break
  fi
done
if [ -z "$formatter" ]; then
  echo "check_format: clang-format 14 is not installed; skipped"
  exit 77
fi

folders=()
for folder in include tests examples tools benchmarks; do
  [ -d "$folder" ] && folders+=("$folder")
done
mapfile -d '' sources < <(find "${folders[@]}" -type f \
  \( -name '*.hpp' -o -name '*.cpp' -o -name '*.cuh' -o -name '*.cu' \) -print0 | sort -z)

# The output is compared, since --dry-run of version 14 also reports replacements that change
# nothing; all files at once first, since starting the formatter costs more than its work.
if "$formatter" "${sources[@]}" | cmp -s - <(cat "${sources[@]}"); then
  exit 0
fi
for source in "${sources[@]}"; do
  "$formatter" "$source" | cmp -s - "$source" || echo "$source"
done
echo "check_format: $formatter -i on these files mends them"
exit 1
