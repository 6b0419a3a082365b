# make demo     fetch the small model, run producer and decoder on loopback, ask, answer
# make test     every test (under ten minutes on 2 cores)
# make check    format, lint, types, import rules, tests
# make soak     long loops and the real demo model
# make bench    the figures of docs/performance.md
# make screenshots    the README's pictures (needs Chromium, Xvfb, trayer)
# make venv     only the environment;  make clean  removes it

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check -c constraints.txt
PACKAGES := protocol trust mac_decoder gb10_producer app tests conftest.py
# Where it is installed (Debian: libopenblas0-pthread), a BLAS whose results depend on shapes, as a GPU's do.
OPENBLAS := $(firstword $(wildcard /usr/lib/*-linux-gnu/openblas-pthread/libblas.so.3))
PRELOAD := $(if $(OPENBLAS),LD_PRELOAD=$(OPENBLAS))
# Test processes side by side; each loads both frameworks. One more than there are cores to measure it on:
# tests wait for processes, clocks and disks.
WORKERS ?= 3
# Else each of the hundred processes that tests start would compile Baton, and each worker all tests.
unexport PYTHONDONTWRITEBYTECODE
# Set to pass options on, as in: make demo ARGS="--compare-local"
ARGS ?=

.PHONY: venv demo test check lint soak bench screenshots clean

venv: $(VENV)/dev.stamp

$(BIN)/python:
	@for python in $(PYTHON) python3.13 python3.12 python3.11 python3; do \
		if $$python -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
			echo "making $(VENV) with $$($$python --version)"; \
			exec $$python -m venv $(VENV); \
		fi; \
	done; \
	echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3" >&2; exit 1

$(VENV)/both.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[both]'
	@touch $@

$(VENV)/dev.stamp: pyproject.toml constraints.txt | $(BIN)/python
	$(PIP) -e '.[dev]'
	@touch $@ $(VENV)/both.stamp

demo: $(VENV)/both.stamp
	$(BIN)/baton demo $(ARGS)

# Each test once, with the harder BLAS where it is installed; soak has both.
test: $(VENV)/dev.stamp
	$(PRELOAD) $(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal $(ARGS)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff format --check $(PACKAGES)
	$(BIN)/ruff check $(PACKAGES)
	PATH=$(CURDIR)/$(BIN):$$PATH $(BIN)/pyright
	$(BIN)/lint-imports

check: lint test

# Every test, those of `make test` too: without that BLAS, and with five times the examples.
soak: $(VENV)/dev.stamp
ifneq ($(OPENBLAS),)
	LD_PRELOAD=$(OPENBLAS) $(BIN)/python -m pytest -q -m 'both_blas and soak' --timeout 3600 $(ARGS)
endif
	$(BIN)/python -m pytest -q -n $(WORKERS) --dist worksteal --hypothesis-profile thorough --timeout 900 $(ARGS)
	$(BIN)/python -m pytest -q -m soak --hypothesis-profile thorough --timeout 3600 $(ARGS)
	$(BIN)/python -m tests.mutants

bench: $(VENV)/dev.stamp
	$(BIN)/baton bench handoff --layout muse-glimmer --prompt 65536
	$(BIN)/baton bench handoff --layout muse-glimmer --prompt 65536 --tls
	$(BIN)/python -m tests.benchmarks.ten_chats
	$(BIN)/baton bench ttft
	smollm2=$$($(BIN)/python -m tests.benchmarks.smollm2) && \
	$(BIN)/python -m tests.benchmarks.engine_overhead --model $$smollm2/fp32 && \
	$(BIN)/python -m tests.benchmarks.endpoint_overhead && \
	$(BIN)/python -m tests.benchmarks.reuse_ttft --model $$smollm2/fp32 && \
	$(BIN)/python -m tests.benchmarks.delta_compute --model $$smollm2/fp32 && \
	$(BIN)/python -m tests.benchmarks.publish_cost --model $$smollm2/fp32 && \
	$(BIN)/python -m tests.benchmarks.lookup && \
	$(BIN)/python -m tests.benchmarks.durable_restore && \
	$(BIN)/python -m tests.benchmarks.chat_disk && \
	$(BIN)/python -m tests.benchmarks.face_cost --model $$smollm2/fp32 --tokens 80 && \
	$(PRELOAD) $(BIN)/python -m tests.benchmarks.exactness $$smollm2

screenshots: $(VENV)/dev.stamp
	$(BIN)/python -m tests.screenshots

clean:
	rm -rf $(VENV) build .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
