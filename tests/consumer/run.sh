#!/usr/bin/env bash
# run.sh CMAKE BUILD_FOLDER TORCH_FOLDER NINJA: installs the build, then builds and runs the consumer, all outside the tree.
set -euo pipefail
cmake=$1 build=$2 torch=$3 ninja=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT

"$cmake" --install "$build" --prefix "$elsewhere/prefix" >"$elsewhere/install.log"
if grep -rnF -e "$torch" -e "$build" "$elsewhere/prefix/lib"*/cmake; then
  echo "the installed package names a path of the machine it was built on" >&2
  exit 1
fi

mkdir "$elsewhere/source"
cp "$here/CMakeLists.txt" "$here/main.cpp" "$elsewhere/source"
"$cmake" -S "$elsewhere/source" -B "$elsewhere/build" -G Ninja -DCMAKE_MAKE_PROGRAM="$ninja" \
  -DCMAKE_PREFIX_PATH="$elsewhere/prefix" -DSATCHEL_TORCH_DIR="$torch"
"$cmake" --build "$elsewhere/build"
"$elsewhere/build/consumer"
