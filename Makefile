# `make demo` and `make test` work on a bare machine with Python 3.10+ and a C++20 compiler.
PYTHON ?= python3
VENV := .venv
PY := $(VENV)/bin/python
PIP := $(PY) -m pip --disable-pip-version-check -q

.PHONY: setup build demo test test-slow soak bench lint format clean

# The pinned torch is the CPU build; the package itself accepts any torch >= 2.10. No build
# isolation: an isolated build would fetch a second torch.
$(VENV)/.ready: pyproject.toml
	test -x $(PY) || $(PYTHON) -m venv $(VENV)
	$(PIP) install --upgrade pip "setuptools>=77" wheel ninja
	$(PIP) install torch==2.13.0 numpy
	$(PIP) install --no-build-isolation -e ".[gguf,notebook,test,dev]"
	touch $@

setup: $(VENV)/.ready

build: setup
	$(PY) setup.py -q build_ext --inplace

demo: build
	$(PY) examples/demo.py

test: build
	$(PY) -m pytest -m "not slow"

test-slow: build
	$(PY) -m pytest -m slow

# 64 requests at once for five minutes, on the demo's model: SOAK="--model DIR --seconds N".
soak: build
	$(PY) -m tests.soak $(SOAK)

bench: build
	$(PY) -m tests.bench

lint: setup
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .
	$(PY) -m mypy
	$(VENV)/bin/clang-format --dry-run --Werror $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

format: setup
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .
	$(VENV)/bin/clang-format -i $$(git ls-files '*.cpp' '*.h' '*.cu' '*.cuh')

clean:
	rm -rf build dist *.egg-info exl3_ext/*.so
