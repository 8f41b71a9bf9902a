# Two commands need nothing but Python >= 3.11 and make: `make demo` and `make test`.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: demo test docs torture lint types format locked audit-deps clean

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; v = sys.version_info; sys.exit(0 if v >= (3, 11) else f"ProtoSeam needs Python 3.11 or newer; {sys.executable} is {v.major}.{v.minor}. Try: make PYTHON=python3.11")'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lab,vision,report,tune,sklearn,lightning,timm,huggingface,loggers,onnx,docs,dev]'
	touch $@

demo: $(STAMP)  ## Baseline, Unlifted and ProtoSeam on the digits, on a CPU
	$(BIN)/protoseam demo

test: lint types  ## every check and every test
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

docs: $(STAMP)  ## the documentation site, into build/site
	$(BIN)/python docs/build.py

torture: $(STAMP)  ## the long forms of the reliability tests, about an hour; writes results/torture
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[lab,vision,report,tune,dev,fuzz]' 'psycopg[binary]'
	$(BIN)/python torture/all.py

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

locked:  ## a new .venv of exactly the files in requirements.lock (Linux x86_64, Python 3.11; torch comes with CUDA)
	$(PYTHON) -m venv --clear $(VENV)
	$(BIN)/python -m pip install --quiet --require-hashes --only-binary :all: -r requirements.lock
	$(BIN)/python -m pip install --quiet --no-deps --no-build-isolation -e .
	touch $(STAMP)

audit-deps:  ## known vulnerabilities of the locked packages; asks a public service, so it needs the network
	$(PYTHON) -m venv .venv-audit
	.venv-audit/bin/python -m pip install --quiet 'pip-audit>=2.9'
	.venv-audit/bin/pip-audit --strict --disable-pip --require-hashes -r requirements.lock

clean:
	rm -rf $(VENV) .venv-audit build dist .pytest_cache .mypy_cache .ruff_cache
