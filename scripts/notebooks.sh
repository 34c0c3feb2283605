#!/usr/bin/env bash
# notebooks.sh [OPTION…]: runs examples/notebooks, with the module of the build folder. Options: scripts/notebooks.py's.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
all_of_torch requirements-python.txt requirements-notebooks.txt
scripts/build.sh release satchel_stable
export SATCHEL_LIBRARY=$PWD/build/python/_satchel.so PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
exec "$TORCH_PYTHON" scripts/notebooks.py "$@"
