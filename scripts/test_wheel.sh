#!/usr/bin/env bash
# test_wheel.sh [VERSION…]: one wheel, built with this machine's torch, under each of these versions of torch (2.10.*, and the newest): tests of
# the ops (torch.library.opcheck among them), of packing(), compile() and convert(). About 5 GB and five minutes a version; a version's venv is
# removed when its tests end. WHEEL=FILE takes a wheel that is there.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
all_of_torch requirements-python.txt
[[ -n "${WHEEL:-}" ]] || WHEEL=$(scripts/wheel.sh | tail -n 1)
[[ -f "$WHEEL" ]] || die "WHEEL must be a file, got $WHEEL"
WHEEL=$(realpath "$WHEEL")
if [[ $# -gt 0 ]]; then versions=("$@"); else
  newest=$("$TORCH_PYTHON" -m pip index versions torch 2>/dev/null | sed -nE '1s/.*\(([0-9.]+)\).*/\1/p')
  versions=('2.10.*' "${newest:?}")
fi

tests=$PWD/python/tests
venv=$(mktemp -d "${TMPDIR:-/tmp}/satchel-wheel-XXXXXX")
trap 'rm -rf "$venv"' EXIT
for version in "${versions[@]}"; do
  rm -rf "$venv"
  "$TORCH_PYTHON" -m venv "$venv"
  say "torch $version into a venv (about 5 GB)"
  "$venv/bin/pip" install --quiet --disable-pip-version-check "torch==$version" 'numpy<3' 'pytest>=8'
  "$venv/bin/pip" install --quiet --disable-pip-version-check --no-deps "$WHEEL"
  (
    cd "$venv"  # not in the clone: the installed package is the one that is imported
    unset SATCHEL_LIBRARY PYTHONPATH
    bin/python -c 'import satchel, sys, torch; print(f"satchel {satchel.__version__}, torch {torch.__version__}, Python {sys.version.split()[0]}")'
    PYTHONDONTWRITEBYTECODE=1 bin/python -m pytest -q -p no:cacheprovider "$tests"/test_{opcheck,codec,packing,edges,unbiased,compile,norms,activations,waiting,convert,convert_hostile}.py
  ) || die "the wheel fails under torch $version"
done
