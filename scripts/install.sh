#!/usr/bin/env bash
# install.sh PREFIX: installs what build.sh has built as `release`.
source "$(dirname "${BASH_SOURCE[0]}")/setup.sh"
exec "$CMAKE" --install build --prefix "$1"
