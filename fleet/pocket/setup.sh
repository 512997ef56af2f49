#!/usr/bin/env bash
# Installs espeak-ng, the teacher's voice, which pip cannot bring. Does nothing where it is there already.
set -euo pipefail

if "$(command -v python3.11 || command -v python3)" -c 'import ctypes; ctypes.CDLL("libespeak-ng.so.1")' 2>/dev/null; then
    echo "all there"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "this is not Debian: install espeak-ng with your own package manager" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "as root, run: apt-get install espeak-ng" >&2; exit 1; }
    as_root=(sudo)
fi
"${as_root[@]}" apt-get update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends espeak-ng
