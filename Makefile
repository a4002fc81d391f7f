# `make help` lists the targets. PYTHON=/path/to/python3.12 chooses the interpreter that .venv is made with.
VENV := .venv
RUN := $(VENV)/bin/python
STAMP := $(VENV)/.installed

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help install demo bench compare layouts reshard soak test lint format freeze clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

install: $(STAMP)  ## make .venv with the tested versions of everything (the other targets do it by themselves)
	@echo "$(VENV) is ready."

# The stamp holds the folder, since scripts in a venv name it: a checkout that was moved needs a new one, and so does a
# venv whose interpreter is gone or is another Python. One that an interrupted install left is finished.
ifneq ($(shell [ -x $(RUN) ] && cat $(STAMP) 2>/dev/null),$(CURDIR))
.PHONY: $(STAMP)
endif
$(STAMP): constraints.txt pyproject.toml setup.py .python-version
	@if [ "$$($(RUN) -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null)" != "$$(cat .python-version)" ] \
	    || { [ -f $@ ] && [ "$$(cat $@)" != "$(CURDIR)" ]; }; then \
	    python=$$(tools/find_python.sh $(if $(PYTHON),"$(PYTHON)")) || exit 1; \
	    echo "Making $(VENV) with $$python"; \
	    "$$python" -m venv --clear $(VENV) || exit 1; \
	fi
	@echo "Installing the versions in constraints.txt; the first time PyTorch makes this take some minutes."
	@$(RUN) -m pip install --quiet --constraint constraints.txt setuptools
	$(RUN) -m pip install --constraint constraints.txt --no-build-isolation --editable '.[dev]'
	@printf '%s\n' "$(CURDIR)" > $@

demo: $(STAMP)  ## train a small GPT with Shampoo on 4 CPU processes, about 4 minutes (DEMO="--help" for options)
	@$(RUN) tools/demo.py $(DEMO)

bench: $(STAMP)  ## time the optimizers against each other, about an hour (BENCH="--help" for options)
	@$(RUN) tools/bench.py $(BENCH)

compare: $(STAMP)  ## train a small GPT with every optimizer, rates tuned, more than an hour (COMPARE="--help" for options)
	@$(RUN) tools/compare.py $(COMPARE)

layouts: $(STAMP)  ## one training run on every parallel layout, about 7 minutes (LAYOUTS="-k MoE" for a part)
	@$(RUN) -m pytest -n auto --maxprocesses 4 --dist worksteal tests/layouts --all-layouts $(LAYOUTS)

reshard: $(STAMP)  ## checkpoints moved between all pairs of layouts, about 20 minutes (RESHARD="-k MoE" for a part)
	@$(RUN) -m pytest -n auto --maxprocesses 4 --dist loadgroup tests/reshard --all-pairs $(RESHARD)

soak: $(STAMP)  ## 2,000 steps with random faults, and a rank that freezes, about 3 minutes (SOAK="--soak-steps 10000" for more)
	@$(RUN) -m pytest -s tests/soak --soak-steps 2000 $(SOAK)

test: $(STAMP)  ## run the whole test suite, on up to 4 cores (TESTS="tests/unit -k plan" for a part)
	@$(RUN) -m pytest -n auto --maxprocesses 4 --dist worksteal $(TESTS)

lint: $(STAMP)  ## check style, formatting and types (ruff, mypy)
	$(RUN) -m ruff check
	$(RUN) -m ruff format --check --quiet
	$(RUN) -m mypy

format: $(STAMP)  ## rewrite the sources as `make lint` wants them
	$(RUN) -m ruff check --fix --quiet
	$(RUN) -m ruff format --quiet

freeze: $(STAMP)  ## write the versions that .venv has now into constraints.txt
	@{ sed -n '/^#/p' constraints.txt; \
	   $(RUN) -m pip freeze --all --exclude-editable --exclude pip --exclude megatron-shampoo; } > constraints.new
	@mv constraints.new constraints.txt

clean:  ## remove caches and build outputs; .venv, data/ and runs/ stay
	rm -rf build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find . -name __pycache__ -not -path './$(VENV)/*' -prune -exec rm -rf {} +
