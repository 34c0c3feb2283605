#!/usr/bin/env bash
# test.sh PRESET: runs the tests of what build.sh has built; ctest's closing line is the last.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
export OMP_WAIT_POLICY=passive  # tests run beside each other: threads that spin would take the others' cores
exec "$CTEST" --preset "$1" --parallel "$JOBS"
