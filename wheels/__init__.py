"""Wheels of p2pavg: `python -m wheels` (or `make wheel`) builds, `python -m wheels.bare` tries one.

A wheel is compiled by zig's clang, which links against the symbols that glibc 2.28 has, with its C++ library
inside; the CUDA kernels are compiled by nvcc, with the CUDA runtime inside. auditwheel gives the platform
tag, and refuses a wheel that needs more than that tag allows. One wheel is for Python 3.11 alone, the other
for 3.12
and later: the stable ABI that nanobind uses begins there.
"""
