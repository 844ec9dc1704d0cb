# Every target works on a fresh Debian machine as root with make, git and python3-venv; see README.md.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
# Processes that share the test files; each has a lab of its own.
LANES ?= 2

.PHONY: help venv test test-unit test-all test-smoke soak bench fuzz demo update-harnesses lab lab-shell lab-down lint format clean

help:
	@echo "make demo       the main job in the lab: a real agent in a sandbox, and what it could not reach"
	@echo "make test       unit, contract and representative system tests"
	@echo "make test-all   everything, on every engine (ENGINES=\"trixie bookworm sid\"); writes docs/results/"
	@echo "make test-smoke a few system tests on another engine (ENGINE=bookworm)"
	@echo "make soak       a million steps of the service against a host that fails in every way"
	@echo "make bench      how long things take; writes docs/results/bench.json"
	@echo "make fuzz       100,000 damaged policies"
	@echo "make update-harnesses  the newest agents, with their hashes, into agent_image/harnesses.lock.json"
	@echo "make lab        bring the lab up and keep it (lab-shell, lab-down)"

venv: $(STAMP)

$(STAMP): requirements/test.lock pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --require-hashes -r requirements/test.lock
	$(BIN)/pip install --quiet --disable-pip-version-check --no-deps --editable .
	@touch $@

test: $(STAMP)
	CORRAL_FUZZ_INPUTS=100000 CORRAL_HYPOTHESIS_STEPS=100000 $(BIN)/python -m pytest -n $(LANES) --dist loadfile -m "not lab or representative" --durations=15

test-unit: $(STAMP)
	$(BIN)/python -m pytest -n $(LANES) --dist loadfile tests/unit tests/contract

test-all: $(STAMP)
	CORRAL_FUZZ=100000 CORRAL_FUZZ_INPUTS=100000 CORRAL_HYPOTHESIS_STEPS=100000 $(BIN)/python -m tests.results $(ENGINES)

test-smoke: $(STAMP)
	CORRAL_LAB_ENGINE=$(or $(ENGINE),bookworm) $(BIN)/python -m pytest -m smoke --durations=10 tests/system

soak: $(STAMP)
	CORRAL_MACHINE_SEED=random CORRAL_MACHINE_STEPS=1000000 CORRAL_HYPOTHESIS_STEPS=100000 $(BIN)/python -m pytest -q \
		tests/unit/enforcer/machine/test_machine.py tests/unit/enforcer/test_pins_interleavings.py
	CORRAL_FUZZ=1000000 CORRAL_FUZZ_SEED=$$(date +%s) $(BIN)/python -m pytest -q tests/unit/agent_image/proxy/test_fuzz.py

bench: $(STAMP)
	$(BIN)/python -m tests.bench

fuzz: $(STAMP)
	CORRAL_FUZZ=100000 $(BIN)/python -m pytest -q tests/unit/policy/test_fuzz_volume.py

demo: $(STAMP)
	$(BIN)/python -m tests.demo

update-harnesses: $(STAMP)
	$(BIN)/python -m agent_image.refresh

lab: $(STAMP)
	CORRAL_LAB_KEEP=1 $(BIN)/python -m tests.lab up

lab-shell: $(STAMP)
	$(BIN)/python -m tests.lab shell

lab-down: $(STAMP)
	$(BIN)/python -m tests.lab down

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis dist build
