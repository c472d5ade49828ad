# A fresh machine needs Python 3.11+ and make; every target sets up .venv when it has to.
#   make demo               the built-in target, plain and with each drafter; same output or exit 1
#   make test               all tests that this machine can run
#   make test-cpus          parts of them on this CPU in the forms of others
#   make test-vllm          the tests that need vLLM, with its CPU build in .venv-vllm
#   make check              ruff, ruff format, mypy --strict
#   make docs               renews the generated pages and builds the site into site/, without a network
#   make audit              the pinned packages against the list of known vulnerabilities, where it is reached
#   make mutants            breaks the source in small ways and names those that no test notices
#   make browser            Debian's Chromium, if there is none: `make test` then looks at reports in it
#   make clean              removes both environments and caches of the tools
# PYTHON=python3.12 chooses the interpreter, ARGS="..." goes on to the command.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.installed-docs
VLLM_VENV := .venv-vllm
AUDIT_VENV := .venv-audit
VLLM_BIN := $(VLLM_VENV)/bin
VLLM_STAMP := $(VLLM_VENV)/.installed

.PHONY: demo test test-cpus test-vllm check docs audit mutants browser clean

demo: $(STAMP)
	$(BIN)/peagle demo $(ARGS)

# A process for each core, at most four, of one thread each: most tests have work for no more.
test: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n auto --maxprocesses 4 --dist worksteal $(ARGS)

test-cpus: $(STAMP)
	tests/other_cpus.sh $(BIN)/python $(ARGS)

test-vllm: $(VLLM_STAMP)
	$(VLLM_BIN)/python -m pytest tests/vllm $(ARGS)

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

docs: $(DOCS_STAMP)
	$(BIN)/python benchmarks/results_page.py
	$(BIN)/python benchmarks/speed_plot.py
	$(BIN)/python docs/cli_page.py
	$(BIN)/python docs/recipe_page.py
	$(BIN)/python docs/models_page.py
	$(BIN)/python docs/architecture_table.py
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	! grep -rlE '(src|srcset)="?https?://|url\(https?://' site --include='*.html' --include='*.css'

# pip-audit exits with 1 both for a finding and for a list that it cannot reach; only the first writes a report.
audit:
	test -x $(AUDIT_VENV)/bin/pip-audit || { $(PYTHON) -m venv $(AUDIT_VENV) && \
	  $(AUDIT_VENV)/bin/python -m pip install --quiet pip-audit; } || \
	  { echo "pip-audit could not be installed: nothing was audited"; exit 0; }
	rm -f $(AUDIT_VENV)/report
	timeout 300 $(AUDIT_VENV)/bin/pip-audit --progress-spinner off --disable-pip --no-deps \
	  --requirement constraints.txt --output $(AUDIT_VENV)/report || \
	  { test ! -s $(AUDIT_VENV)/report && echo "the list of vulnerabilities was not reached: nothing was audited"; } || \
	  { cat $(AUDIT_VENV)/report; exit 1; }

mutants: $(STAMP)
	$(BIN)/python tests/mutants.py $(ARGS)

browser:
	command -v chromium || { apt-get -q update && apt-get -qy install --no-install-recommends chromium; }

clean:
	rm -rf $(VENV) $(VLLM_VENV) $(AUDIT_VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist site
	find src tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp is written last, so an interrupted install is done again.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "error: $(PYTHON) is not Python 3.11 or newer" >&2; \
	    echo "hint: make PYTHON=/path/to/python3.12" >&2; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev]'
	touch $@

$(DOCS_STAMP): $(STAMP)
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[docs]'
	touch $@

# torch first and with its own needs, so that a CUDA build works as well; nothing else is resolved.
$(VLLM_STAMP): pyproject.toml constraints-vllm.txt
	test -x $(VLLM_BIN)/python || $(PYTHON) -m venv $(VLLM_VENV)
	$(VLLM_BIN)/python -m pip install --quiet -c constraints-vllm.txt torch
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -r constraints-vllm.txt
	$(VLLM_BIN)/python -m pip install --quiet --no-deps -e .
	touch $@
