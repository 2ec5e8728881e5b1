# make quickstart  trains the packaged model by GRPO, about a minute (MORE="--config.seed=1" or any other knob)
# make setup   a virtual environment in .venv with everything that development needs
# make test    the tests (MORE="-m 'not slow'", MORE=--long for those of several minutes too, any pytest arguments)
# make check   ruff and pyright
# make model   SmolLM2-135M-Instruct in models/smollm2-135m
# make addition  trains it on one-digit sums by GRPO: runs/addition (MORE="--config.trainer.steps=10" or any other knob)
PYTHON ?= python3
VENV ?= .venv
MORE ?=
# A process for each core, four at most: each compiles, and may take 3 GB. A file's tests stay together, since they
# share runs. One process, for a debugger say: MORE=-n0
TESTERS ?= --numprocesses=auto --maxprocesses=4 --dist=loadfile --no-loadscope-reorder

.PHONY: quickstart setup test check model addition clean

quickstart: setup
	$(VENV)/bin/python -m jaxrl_llm.train --config configs/quickstart.py $(MORE)
	@echo "(python is that of the environment: . $(VENV)/bin/activate)"

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml requirements.txt
	@command -v $(PYTHON) >/dev/null || { echo "missing: $(PYTHON) (3.11, 3.12 or 3.13; another one: make PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { echo "missing: Python 3.11 or later; $(PYTHON) is older (another one: make PYTHON=...)"; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "missing: the venv module of $(PYTHON) (Debian, Ubuntu: apt-get install python3-venv)"; exit 1; }
	@echo "installing into $(VENV): a minute or two, 1.5 GB, once"
	@$(PYTHON) -m venv $(VENV)
	@# compat: a path, not a finder, or Python started above the checkout would take the checkout for the package.
	@$(VENV)/bin/pip install --quiet --disable-pip-version-check --config-settings editable_mode=compat \
		--requirement requirements.txt --editable '.[test]'
	touch $@

test: setup
	$(VENV)/bin/python -m pytest $(TESTERS) $(MORE)

check: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

model: setup
	$(VENV)/bin/python -m jaxrl_llm.fetch smollm2-135m

addition: model
	$(VENV)/bin/python -m jaxrl_llm.train --config configs/smollm2_addition.py --workdir runs/addition $(MORE)

clean:
	rm -rf $(VENV)
