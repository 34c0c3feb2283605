#!/usr/bin/env bash
# run.sh CMAKE BUILD_FOLDER TORCH_FOLDER NINJA: installs the build, then builds and runs the consumer, all outside the tree.
set -euo pipefail
cmake=$1 build=$2 torch=$3 ninja=$4
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
elsewhere=$(mktemp -d)
trap 'rm -rf "$elsewhere"' EXIT
die() { echo "consumer: $*" >&2; exit 1; }

"$cmake" --install "$build" --prefix "$elsewhere/prefix" >"$elsewhere/install.log"
package=$(dirname "$(find "$elsewhere/prefix" -name SatchelConfig.cmake)")
if grep -rnF -e "$build" "$package"; then die "the installed package names the folder it was built in"; fi
if grep -rlF -e "$torch" "$package" | grep -v /SatchelConfig.cmake; then die "torch's folder is named outside of SatchelConfig.cmake"; fi
if grep -rlE '^// .*Private' "$elsewhere/prefix/include"; then die "private headers are installed"; fi

mkdir "$elsewhere/source"
cp "$here/CMakeLists.txt" "$here/main.cpp" "$elsewhere/source"
# configure FOLDER OPTION…: as the README says, with nothing but the prefix.
configure() {
  local folder=$1
  shift
  "$cmake" -S "$elsewhere/source" -B "$elsewhere/$folder" -G Ninja -DCMAKE_MAKE_PROGRAM="$ninja" -DCMAKE_PREFIX_PATH="$elsewhere/prefix" "$@"
}
if configure wrong -DSATCHEL_TORCH_DIR="$elsewhere" >"$elsewhere/wrong.log" 2>&1; then die "a folder without torch was accepted"; fi
tr -s ' \n' ' ' <"$elsewhere/wrong.log" | grep -qF "found no torch in $elsewhere: set SATCHEL_TORCH_DIR to the folder of torch" ||
  { cat "$elsewhere/wrong.log"; die "the error does not say what to set"; }
configure build
"$cmake" --build "$elsewhere/build"
"$elsewhere/build/consumer"
