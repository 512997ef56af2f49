#!/usr/bin/env bash
# Installs the Debian packages that the tests need and that pip cannot bring. Does nothing where they are there already.
set -euo pipefail

missing=()
command -v chromium >/dev/null || missing+=(chromium)
command -v curl >/dev/null || missing+=(curl)
"$(command -v python3.11 || command -v python3)" -c 'import ensurepip' 2>/dev/null || missing+=(python3-venv)
"$(command -v python3.11 || command -v python3)" -c 'import ctypes; ctypes.CDLL("libespeak-ng.so.1")' 2>/dev/null || missing+=(espeak-ng)
compgen -G "/usr/lib*/*/faketime/libfaketimeMT.so.1" >/dev/null || missing+=(faketime)

if [ "${#missing[@]}" -eq 0 ]; then
    echo "all there"
    exit 0
fi
if ! command -v apt-get >/dev/null; then
    echo "this is not Debian: install ${missing[*]} with your own package manager, then run this again" >&2
    exit 1
fi
as_root=()
if [ "$(id -u)" -ne 0 ]; then
    command -v sudo >/dev/null || { echo "as root, run: apt-get install ${missing[*]}" >&2; exit 1; }
    as_root=(sudo)
fi
echo "installing ${missing[*]}"
"${as_root[@]}" apt-get update
"${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends "${missing[@]}"
