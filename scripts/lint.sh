#!/usr/bin/env bash
# lint.sh [--fix]: checks the format of every source and runs clang-tidy over the torch-free rooms; with --fix it formats instead.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
type -P clang-format clang-tidy >/dev/null || install_packages clang-format clang-tidy

mapfile -t sources < <(find satchel tools tests examples \( -name '*.h' -o -name '*.cpp' -o -name '*.cu' -o -name '*.cuh' \) | sort)
if [[ "${1:-}" == --fix ]]; then
  exec clang-format -i "${sources[@]}"
fi
clang-format --dry-run --Werror "${sources[@]}"

# The preset `core` knows how these files are compiled; nothing of it is built. The vector kernels ask g++ for CPU features by names
# that clang 14 does not know, so clang-tidy cannot read them.
[[ -f build/core/compile_commands.json ]] || "$CMAKE" --preset core -DCMAKE_MAKE_PROGRAM="$NINJA" >/dev/null
mapfile -t checked < <(grep -oP '"file": "\K[^"]*/satchel/[^"]*' build/core/compile_commands.json | grep -v -e /avx -e /emulated/)
printf '%s\0' "${checked[@]}" | xargs -0 -n 1 -P "$JOBS" clang-tidy --quiet -p build/core
