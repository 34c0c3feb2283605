#!/usr/bin/env bash
# wheel.sh: the Python wheel into build/dist, with this machine's torch.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
all_of_torch requirements-python.txt
PATH="$(dirname "$CMAKE"):$(dirname "$NINJA"):$PATH" "$TORCH_PYTHON" -m pip wheel . --quiet --no-build-isolation --no-deps --wheel-dir build/dist
ls build/dist/satchel-*.whl
