# Sourced by the other scripts: makes the machine ready, then names PYTHON, CMAKE, CTEST and NINJA. Prints nothing where all is there.
#   PYTHON empty: Debian packages by apt-get, torch, cmake and ninja by pip into .venv: without a GPU only what C++ on the CPU needs; nvcc
#     too for a GPU without a toolkit, and where COMPILE_CUDA is set
#   PYTHON given: its torch and its (or the PATH's) cmake and ninja; nothing is downloaded
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

export JOBS=${JOBS:-$(nproc)}  # compilers and tests at once

# Some virtual machines list AMX and hide its palette, which is CPUID's leaf 29: torch's bf16 products on the CPU then die of an illegal
# instruction. oneDNN is told to do without, as tools/amx.h does for the command.
if grep -qsw amx_tile /proc/cpuinfo && [[ "$(awk '/^cpuid level/ {print $4; exit}' /proc/cpuinfo)" -lt 29 ]]; then
  export ONEDNN_MAX_CPU_ISA=${ONEDNN_MAX_CPU_ISA:-AVX512_CORE_FP16}
fi

die() { echo "satchel: $*" >&2; exit 1; }
say() { echo "satchel: $*" >&2; }

# install_packages NAME…: installs those Debian packages that are missing.
install_packages() {
  command -v dpkg-query >/dev/null || return 0  # not Debian: CMake names what it misses
  local missing=() name
  for name in "$@"; do
    [[ "$(dpkg-query -W -f='${db:Status-Status}' "$name" 2>/dev/null)" == installed ]] || missing+=("$name")
  done
  [[ ${#missing[@]} -gt 0 ]] || return 0

  local as_root=() manual="apt-get update && apt-get install -y --no-install-recommends ${missing[*]}"
  if [[ "$(id -u)" != 0 ]]; then
    # sudo may ask for a password only where somebody can type it.
    if command -v sudo >/dev/null && { [[ -t 0 ]] || sudo -n true 2>/dev/null; }; then as_root=(sudo)
    else die "Debian packages are missing; as root run: $manual"; fi
  fi
  say "installing Debian packages: ${missing[*]}"
  { "${as_root[@]}" apt-get update -qq &&
    "${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" >/dev/null; } ||
    die "apt-get failed (its reason is above); as root run: $manual"
}

# Is there a GPU that the kernels run on? They need compute capability 8.0, as cmake/SatchelArchitectures.cmake says.
has_gpu() {
  command -v nvidia-smi >/dev/null &&
    nvidia-smi --query-gpu=compute_cap --format=csv,noheader 2>/dev/null | grep -qE '^([89]|[1-9][0-9]+)\.[0-9]'
}

# Is there an nvcc of the same CUDA major version as the pinned torch?
has_toolkit() {
  local nvcc
  for nvcc in nvcc "${CUDA_HOME:-/usr/local/cuda}/bin/nvcc"; do
    if command -v "$nvcc" >/dev/null && "$nvcc" --version | grep -q 'release 13\.'; then return 0; fi
  done
  return 1
}

venv=.venv

# has_installed LIST: is this very list of packages in the venv?
has_installed() { grep -qxF "$(sha256sum "$1")" "$venv/installed.sha256" 2>/dev/null; }

# pip_install SIZE LIST [OPTION…]: installs a list into the venv, once.
pip_install() {
  local size=$1 list=$2
  shift 2
  ! has_installed "$list" || return 0
  "$venv/bin/python3" -m pip --version >/dev/null 2>&1 || python3 -m venv --clear "$venv" ||
    die "python3 -m venv $venv failed (its reason is above)"
  say "installing $list into $venv (about $size, once)"
  "$venv/bin/python3" -m pip install --quiet --disable-pip-version-check "$@" --requirement="$list" ||
    die "pip failed (its reason is above); with a torch of your own, no download is needed: make … PYTHON=/path/to/python3"
  sha256sum "$list" >>"$venv/installed.sha256"
}

# All of torch and nvcc where kernels are compiled and no toolkit is there (torch's other CUDA wheels have headers that they need); all of
# torch for a GPU; else what C++ on the CPU needs, unless all of it is there.
make_venv() {
  local nvcc=''
  if { has_gpu || [[ -n "${COMPILE_CUDA:-}" ]]; } && ! has_toolkit; then nvcc=yes; fi
  if has_gpu || [[ -n "$nvcc" ]]; then
    pip_install "5 GB" requirements.txt
  elif ! has_installed requirements.txt; then
    pip_install "1.4 GB" requirements-cpu.txt --no-deps
  fi
  [[ -z "$nvcc" ]] || pip_install "350 MB" requirements-nvcc.txt
}

# all_of_torch LIST…: names TORCH_PYTHON, a Python that has all of torch and these lists: PYTHON where it was given, .venv where all of torch
# is there (a GPU), else .venv-python, so that what C++ is built with stays as it is.
all_of_torch() {
  TORCH_PYTHON=$PYTHON
  [[ -z "$given" ]] || return 0
  local list
  has_installed requirements.txt || venv=.venv-python
  pip_install "5 GB" requirements.txt
  for list in "$@"; do pip_install "250 MB" "$list"; done
  TORCH_PYTHON=$PWD/$venv/bin/python3
}

# find_tool NAME OLDEST: the newest-enough NAME beside PYTHON, in its scripts folder or on the PATH; empty where there is none.
find_tool() {
  local scripts path version
  scripts=$("$PYTHON" -c 'import sysconfig; print(sysconfig.get_path("scripts"))')
  for path in "$(dirname "$PYTHON")/$1" "$scripts/$1" "$(type -P "$1" || true)"; do
    [[ -x "$path" && ! -d "$path" ]] || continue
    version=$("$path" --version 2>/dev/null | grep -oEm1 '[0-9]+\.[0-9]+' || true)
    if [[ -n "$version" ]] && printf '%s\n' "$2" "$version" | sort -VC; then
      echo "$path"
      return
    fi
  done
}

given=${PYTHON:-}
if [[ -z "$given" ]]; then
  command -v python3 >/dev/null || die "python3 is missing; as root run: apt-get install -y python3"
  packages=(libcli11-dev libfmt-dev libgtest-dev libpng-dev libturbojpeg0-dev libzip-dev nlohmann-json3-dev pkg-config zlib1g-dev)
  type -P g++ >/dev/null || packages+=(g++)
  if ! [[ -x .venv/bin/python3 ]] && ! python3 -c 'import ensurepip, venv' 2>/dev/null; then packages+=(python3-venv); fi
  install_packages "${packages[@]}"
  make_venv
  PYTHON=$PWD/.venv/bin/python3
else
  PYTHON=$(type -P "$given" || true)
  [[ -n "$PYTHON" ]] || die "PYTHON=$given is no program; give the path of a python3 that has torch"
  # Absolute, but with its links kept: a venv's python3 is a link, and its folder is what makes it the venv's.
  PYTHON=$(cd "$(dirname "$PYTHON")" && pwd)/$(basename "$PYTHON")
  "$PYTHON" scripts/find_torch.py >/dev/null || exit 1
fi

CMAKE=$(find_tool cmake 3.28)
NINJA=$(find_tool ninja 1.10)
[[ -n "$CMAKE" ]] || die "no cmake 3.28 or newer beside $PYTHON or on the PATH; run: $PYTHON -m pip install cmake"
[[ -n "$NINJA" ]] || die "no ninja beside $PYTHON or on the PATH; run: $PYTHON -m pip install ninja"
CTEST=$(dirname "$CMAKE")/ctest
