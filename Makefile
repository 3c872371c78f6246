# `make demo` and `make test` do their own set-up on a fresh Debian 12; a second run reuses it.
.PHONY: help setup lint format test test-slow test-chart test-image demo up down clean
.DEFAULT_GOAL := help

# Images often set it.  Without cached bytecode every start of vLLM compiles its sources anew, half a minute each time.
unexport PYTHONDONTWRITEBYTECODE

BIN := .venv/bin

help: ## Show this list.
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

setup: ## Debian packages, .venv with pinned packages, the model.
	@bash deploy/setup.sh

demo: setup ## Break a real vLLM, watch it being found and healed; a few minutes.
	@$(BIN)/python deploy/demo/demo.py $(ARGS)

up: setup ## Start vLLM and Flipwatch and leave them running; options by ARGS="--help".
	@$(BIN)/python deploy/demo/up.py start $(ARGS)

down: ## Stop what `make up` started.
	@$(BIN)/python deploy/demo/up.py stop

lint: setup ## Ruff, mypy, import contracts.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# Two at a time where there is memory for it, else in turn: most of it is waiting for vLLM servers, whose start keeps one
# core busy, and which hold 2 to 3 GB each.  ARGS="-n 0" runs the tests in turn anywhere.
TESTS_AT_A_TIME := $(shell awk '/^MemTotal/ { print ($$2 > 14000000) ? 2 : 0 }' /proc/meminfo)

PYTEST = start=$$(date +%s); \
	$(BIN)/python -m pytest -n $(TESTS_AT_A_TIME) --dist loadfile --no-loadscope-reorder --durations=15 $(1) $(ARGS); code=$$?; \
	echo "pytest took $$(( $$(date +%s) - start )) s"; exit $$code

test: lint ## Lint, then all tests but those of the three targets below.
	@$(call PYTEST,-m "not slow")

test-slow: setup ## The slow ones: parallel servers, model families, 200 streams over a swap, references, verdicts, automation, alerts.
	@$(call PYTEST,-m slow)

test-chart: setup ## The Helm chart in Helm 3 and 4, against schemas of Kubernetes and checkov; in .venv-deploy.
	@bash tests/chart/run $(ARGS)

test-image: ## Builds the image on a stand-in base and runs it; as root, with buildah.
	@bash tests/image/run $(ARGS)

format: setup ## Let ruff format the code.
	$(BIN)/ruff format .

clean: ## Remove .venv and caches of tools; the model's cache folder stays.
	rm -rf .venv .venv-deploy .venv-image build dist *.egg-info src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
