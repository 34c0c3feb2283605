#!/usr/bin/env bash
# wheel.sh: the Python wheel into build/dist, with this machine's torch.
export WITH_PYTHON=yes
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
PATH="$(dirname "$CMAKE"):$(dirname "$NINJA"):$PATH" "$PYTHON" -m pip wheel . --quiet --no-build-isolation --no-deps --wheel-dir build/dist
ls build/dist/satchel-*.whl
