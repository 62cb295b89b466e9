#!/bin/sh
# Exit 0 when the native modules can be built for the Python given as $1 (default python3); else 1 and one line says why.
python=${1:-python3}
cxx=${CXX:-c++}
command -v "$cxx" >/dev/null 2>&1 || cxx=g++
if ! command -v "$cxx" >/dev/null 2>&1; then
    echo "p2pavg: no C++ compiler found, so the pure-Python twin is used; install g++ for full speed." >&2
    exit 1
fi
include=$("$python" -c 'import sysconfig; print(sysconfig.get_paths()["include"])') || exit 1
if ! printf '#include <Python.h>\n' | "$cxx" -x c++ -fsyntax-only -I"$include" - >/dev/null 2>&1; then
    echo "p2pavg: Python's headers are missing, so the pure-Python twin is used; install python3-dev for full speed." >&2
    exit 1
fi
