#!/usr/bin/env bash
# docs.sh: checks the links and builds the documentation into build/site. MkDocs comes into .venv-docs (46 MB, once); torch and a
# compiler are not needed. PYTHON given: that Python's mkdocs is used and nothing is downloaded.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

die() { echo "satchel: $*" >&2; exit 1; }

python=${PYTHON:-}
if [[ -z "$python" ]]; then
  python=.venv-docs/bin/python3
  if [[ "$(cat .venv-docs/installed.sha256 2>/dev/null)" != "$(sha256sum requirements-docs.txt)" ]]; then
    echo "satchel: installing requirements-docs.txt into .venv-docs" >&2
    python3 -m venv --clear .venv-docs || die "python3 -m venv failed (its reason is above); on Debian: apt-get install -y python3-venv"
    "$python" -m pip install --quiet --disable-pip-version-check --requirement=requirements-docs.txt || die "pip failed (its reason is above)"
    sha256sum requirements-docs.txt >.venv-docs/installed.sha256
  fi
fi
"$python" scripts/list_files.py
"$python" scripts/reproduce.py
"$python" scripts/check_links.py
"$python" -m mkdocs build --quiet --clean || die "mkdocs failed (its reason is above); with PYTHON given: pip install -r requirements-docs.txt"
echo "satchel: open build/site/index.html"
