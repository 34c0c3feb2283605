#!/usr/bin/env bash
# wheel.sh: the Python wheel into build/dist, with this machine's torch. RELEASE=yes compiles the CUDA kernels for every GPU since Ampere, whether
# or not there is one here.
if [[ -n "${RELEASE:-}" ]]; then export COMPILE_CUDA=yes; fi
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
all_of_torch requirements-python.txt
options=()
if [[ -n "${RELEASE:-}" ]]; then
  options=(--config-settings=cmake.define.SATCHEL_CUDA=ON --config-settings=cmake.define.CMAKE_CUDA_ARCHITECTURES=release)
fi
PATH="$(dirname "$CMAKE"):$(dirname "$NINJA"):$PATH" "$TORCH_PYTHON" -m pip wheel . --quiet --no-build-isolation --no-deps --wheel-dir build/dist "${options[@]}"
ls build/dist/satchel-*.whl
