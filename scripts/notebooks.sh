#!/usr/bin/env bash
# notebooks.sh [OPTION…]: runs examples/notebooks, with the module of the build folder. Options: scripts/notebooks.py's.
export WITH_PYTHON=yes WITH_NOTEBOOKS=yes
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
scripts/build.sh release satchel_stable
export SATCHEL_LIBRARY=$PWD/build/python/_satchel.so PYTHONPATH=$PWD/python${PYTHONPATH:+:$PYTHONPATH} PYTHONDONTWRITEBYTECODE=1 HF_HUB_OFFLINE=1
exec "$PYTHON" scripts/notebooks.py "$@"
