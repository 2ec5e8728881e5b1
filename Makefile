# make setup   a virtual environment in .venv with everything that development needs
# make test    the tests (MORE="-m 'not slow'" or any other pytest arguments)
# make check   ruff and pyright
# make model   SmolLM2-135M-Instruct in models/smollm2-135m
PYTHON ?= python3
VENV ?= .venv
MORE ?=

.PHONY: setup test check model clean

setup: $(VENV)/installed

$(VENV)/installed: pyproject.toml requirements.txt
	$(PYTHON) -m venv $(VENV)
	$(VENV)/bin/pip install --quiet --disable-pip-version-check --requirement requirements.txt --editable '.[test]'
	touch $@

test: setup
	$(VENV)/bin/python -m pytest $(MORE)

check: setup
	$(VENV)/bin/ruff check
	$(VENV)/bin/ruff format --check
	$(VENV)/bin/pyright --pythonpath $(VENV)/bin/python

model: setup
	$(VENV)/bin/python -m jaxrl_llm.fetch smollm2-135m

clean:
	rm -rf $(VENV)
