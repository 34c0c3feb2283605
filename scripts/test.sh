#!/usr/bin/env bash
# test.sh PRESET: runs the tests of what build.sh has built; ctest's closing line is the last.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$CTEST" --preset "$1" --parallel "$JOBS"
