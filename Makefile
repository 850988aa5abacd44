# `make` alone lists the commands. PYTHON=/path/to/python3.12 chooses the interpreter of .venv.
BIN := .venv/bin
.DEFAULT_GOAL := help
.PHONY: help quickstart setup test te-check lint format lock clean

help: ## Say what there is
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-12s %s\n", $$1, $$2 }' Makefile

quickstart: ## From nothing to a trained, exported model and a sample (about 6 minutes after setup)
	@bash scripts/quickstart.sh

setup: ## Make or repair .venv (about 5 GB) from requirements.lock
	@sh scripts/setup.sh

test: setup ## Set up and run the tests (ARGS="tests/test_config.py -x" for some of them)
	@$(BIN)/python -m pytest $(ARGS)

te-check: setup ## Check our layers against the real Transformer Engine, without a GPU (builds it first: 10 minutes)
	@bash scripts/te_check.sh $(ARGS)

lint: setup ## Check style, formatting and types
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@sh scripts/typecheck.sh

format: setup ## Format, and repair what ruff can repair
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

lock: setup ## Write requirements.lock again from pyproject.toml (ARGS=--upgrade for newer versions)
	@sh scripts/lock.sh $(ARGS)

clean: ## Remove .venv and caches; data/ and runs/ stay
	@rm -rf .venv .venv-te .venv.busy build *.egg-info .pytest_cache .ruff_cache
	@find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
