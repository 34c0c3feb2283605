#!/usr/bin/env bash
# test_python.sh [PYTEST OPTION…]: the tests of python/, with the module and the C++ library of the build folder.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
all_of_torch requirements-python.txt
scripts/build.sh release satchel_stable satchel
export SATCHEL_LIBRARY=$PWD/build/python/_satchel.so SATCHEL_CPP_LIBRARY=$PWD/build/libsatchel.so PYTHONDONTWRITEBYTECODE=1
exec "$TORCH_PYTHON" -m pytest -q -p no:cacheprovider python/tests "$@"
