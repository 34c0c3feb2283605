#!/usr/bin/env bash
# build.sh PRESET [TARGET…]: sets up, configures where something it rests on has changed, and builds.
if [[ "$1" == cuda* ]]; then export COMPILE_CUDA=yes; fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"

preset=$1
shift
case $preset in release | cuda) folder=build ;; *) folder=build/$preset ;; esac

# What a configuration rests on; to changes of the CMake files ninja itself sees.
key=$(
  echo "$preset $CMAKE $NINJA $PYTHON $("$PYTHON" scripts/find_torch.py) $(sha256sum CMakePresets.json)"
  cat .venv/installed.sha256 2>/dev/null
  type -P nvcc "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"
  nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null
) || true
if [[ "$(cat "$folder/configured" 2>/dev/null)" != "$key" ]]; then
  mkdir -p "$folder"
  # What CMake remembers goes, what was compiled stays (--fresh would delete both).
  rm -rf "$folder"/CMakeCache.txt "$folder"/CMakeFiles/[0-9]*
  if ! "$CMAKE" --preset "$preset" -DCMAKE_MAKE_PROGRAM="$NINJA" -DPython3_EXECUTABLE="$PYTHON" >"$folder/configure.log" 2>&1; then
    cat "$folder/configure.log" >&2
    die "configuring the preset '$preset' failed (its reason is above)"
  fi
  grep '^-- satchel:' "$folder/configure.log"
  echo "$key" >"$folder/configured"
fi
exec "$CMAKE" --build "$folder" --parallel "$JOBS" ${1:+--target "$@"}
