#!/usr/bin/env bash
# test_python.sh [PYTEST OPTION…]: the tests of python/, with the module and the C++ library of the build folder.
export WITH_PYTHON=yes
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
scripts/build.sh release satchel_stable satchel
export SATCHEL_LIBRARY=$PWD/build/python/_satchel.so SATCHEL_CPP_LIBRARY=$PWD/build/libsatchel.so PYTHONDONTWRITEBYTECODE=1
exec "$PYTHON" -m pytest -q -p no:cacheprovider python/tests "$@"
