PYTHON ?= $(firstword $(wildcard .venv/bin/python) python3)
export PATH := $(abspath $(dir $(PYTHON))):$(PATH)

.PHONY: native

# Build the native modules in place (p2pavg/*.so). `sh csrc/can_build.sh PYTHON` tells beforehand whether it can.
native:
	@sh csrc/can_build.sh $(PYTHON)
	@cmake -S . -B build/dev -DPython_EXECUTABLE=$$($(PYTHON) -c 'import sys; print(sys.executable)') >build/dev.log 2>&1 \
		|| { cat build/dev.log; exit 1; }
	@cmake --build build/dev
	@cmake --install build/dev --prefix . >/dev/null
