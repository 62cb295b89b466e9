# make demo   train a language model over three peers, lose one, gain one (about two minutes)
# make test   run the tests, about thirteen minutes on two cores          make lint   style, types, import rule, documentation
# make simulation   the rounds under 22,040 seeded schedules of faults, and all orders of one round (about eight minutes on two cores)
# make world   six peers of strangers in an emulated internet, and what befalls them; about eight minutes, one page
# make fuzz   every parser and the pump's, about a minute in all
# make wheel   wheels that need no compiler where they are installed, into dist/ (minutes; what was tried: docs/deploy.md)
# The first call creates .venv and installs into it; later calls install nothing.

BASE_PYTHON ?= python3
PYTHON ?= $(firstword $(wildcard .venv/bin/python) python3)
export PATH := $(abspath $(dir $(PYTHON))):$(PATH)

VENV_PYTHON := .venv/bin/python
HARDWARE := $(if $(shell nvidia-smi -L 2>/dev/null),gpu,cpu)
# Without a GPU here the CUDA kernels are only built as PTX, which every device since sm_75 compiles when it loads them.
CUDA_TARGETS := $(if $(filter cpu,$(HARDWARE)),-DCMAKE_CUDA_ARCHITECTURES=75-virtual)
INSTALLED := .venv/installed-$(HARDWARE)
BUILT := .venv/built

SEEDS ?= 0:20000
SEVEN_SEEDS ?= 0:2000
LARGE_SEEDS ?= 0:40

.PHONY: demo test simulation world fuzz lint format install native wheel constraints clean

demo: install
	@$(VENV_PYTHON) examples/demo.py $(ARGS)

# Four at a time on two cores: swarms mostly wait for each other, and one of the four has the lab.
test: install
	@$(VENV_PYTHON) -m pytest -n 4 $(ARGS)

simulation: install
	@$(VENV_PYTHON) -m tests.simulation --seeds $(SEEDS) --processes 2
	@$(VENV_PYTHON) -m tests.simulation --peers 7 --seeds $(SEVEN_SEEDS) --processes 2
	@$(VENV_PYTHON) -m tests.simulation --peers 50 --seeds $(LARGE_SEEDS) --processes 2
	@$(VENV_PYTHON) -m tests.simulation.exhaustive --peers 3 --crashes 1
	@$(VENV_PYTHON) -m tests.simulation.exhaustive --peers 2 --crashes 1 --races 2

world: install
	@$(VENV_PYTHON) -m bench.world $(ARGS)

# Without atheris (it has wheels for some platforms only) or clang, pytest runs those targets from their seeds.
fuzz: install .venv/fuzz
	@$(VENV_PYTHON) -m tests.fuzz.run --total 50 --processes 2

.venv/fuzz: $(INSTALLED)
	@$(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check --retries 1 --timeout 10 \
		--only-binary :all: 'atheris>=3' 2>/dev/null || true
	@touch $@

lint: install
	@$(VENV_PYTHON) -m ruff check .
	@$(VENV_PYTHON) -m ruff format --check .
	@$(VENV_PYTHON) -m mypy --strict p2pavg
	@.venv/bin/lint-imports --no-cache
	@$(VENV_PYTHON) -m pages --check
	@NO_MKDOCS_2_WARNING=1 $(VENV_PYTHON) -m mkdocs build --strict --quiet

format: install
	@$(VENV_PYTHON) -m ruff check --fix .
	@$(VENV_PYTHON) -m ruff format .

install: $(INSTALLED) $(BUILT)

# The package is installed as a link to this checkout, without native modules: those are built in place, see below.
$(INSTALLED): pyproject.toml constraints/$(HARDWARE).txt
	@$(BASE_PYTHON) -c 'import sys; sys.version_info >= (3, 11) or \
		sys.exit("p2pavg needs Python 3.11 or newer; name one: make BASE_PYTHON=python3.12 ...")'
	@echo "Installing into .venv (this once; a few minutes, most of them PyTorch) ..."
	@test -x $(VENV_PYTHON) || $(BASE_PYTHON) -m venv .venv
	@P2PAVG_NATIVE=0 $(VENV_PYTHON) -m pip install --quiet --disable-pip-version-check \
		-c constraints/$(HARDWARE).txt --editable '.[dev]'
	@touch $@

$(BUILT): $(INSTALLED) CMakeLists.txt $(shell find csrc -type f)
	@if sh csrc/can_build.sh $(VENV_PYTHON); then echo "Building the native modules ..." && \
		$(MAKE) --no-print-directory native PYTHON=$(VENV_PYTHON) && touch $@; fi

# Build the native modules in place (p2pavg/*.so). `sh csrc/can_build.sh PYTHON` tells beforehand whether it can.
native:
	@sh csrc/can_build.sh $(PYTHON)
	@mkdir -p build
	@cmake -S . -B build/dev $(CUDA_TARGETS) -DPython_EXECUTABLE=$$($(PYTHON) -c 'import sys; print(sys.executable)') >build/dev.log 2>&1 \
		|| { cat build/dev.log; exit 1; }
	@cmake --build build/dev --parallel $$(nproc 2>/dev/null || echo 2) >>build/dev.log 2>&1 \
		|| { grep -v warning build/dev.log | tail -60; exit 1; }
	@cmake --install build/dev --prefix . >/dev/null

# Brings its own tools into build/wheels; PyTorch is not needed.
wheel:
	@$(BASE_PYTHON) -m wheels $(ARGS)

# What a release is installed with: see the head of the file.
constraints:
	@sed '/^[^#]/,$$d' constraints/release.txt >build/release.txt
	@printf '%s\n' 'scikit-build-core>=0.10' 'nanobind>=2.4' 'cmake>=3.25' 'ninja>=1.11' >build/build.in
	@uv pip compile --quiet --generate-hashes --universal --python-version 3.11 --no-header --no-annotate \
		-c constraints/cpu.txt pyproject.toml build/build.in >>build/release.txt
	@mv build/release.txt constraints/release.txt

clean:
	rm -rf .venv build dist out p2pavg/*.so p2pavg/lab/_router .mypy_cache .ruff_cache .pytest_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
