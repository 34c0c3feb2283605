#!/usr/bin/env bash
# with_gpu.sh COMMAND…: runs it where there is a GPU; elsewhere says so and exits with 77, which ctest counts as skipped.
if ! nvidia-smi -L 2>/dev/null | grep -q GPU; then
  echo "satchel: no GPU on this machine (nvidia-smi lists none), so nothing was run: $*" >&2
  exit 77
fi
exec "$@"
