# `make quickstart` and `make test` do everything on a fresh machine; the first of them creates .venv.
#   PYTHON=python3.12        the interpreter .venv is made from (3.11 or later)
#   TORCH_INDEX_URL=...      where torch comes from, e.g. https://download.pytorch.org/whl/cpu on a machine without
#                            a GPU, where the default build would download several gigabytes it cannot use
#   PYTEST_ARGS=...          passed on to pytest
#   WORKERS=3                processes that run tests; each runs whole files, and some tests wait more than they compute
PYTHON ?= python3
TORCH_INDEX_URL ?=
PYTEST_ARGS ?=
WORKERS ?= 3
QUICKSTART_DIR ?= output/quickstart

BIN := .venv/bin
INSTALLED := .venv/.installed
CHECKED_DIRS := src tests recipes benchmarks notebooks docs
# Where `make test` and `make test-slow` write the CPU seconds of every test. With a space after the option, pytest would
# take a file that exists for one with tests, and look for its options there.
CPU_SECONDS := output/cpu_seconds
PYTEST = $(BIN)/python -m pytest -n $(WORKERS) --dist loadscope --no-loadscope-reorder --durations=25
# bf16 only where the CPU multiplies it in hardware; elsewhere it is emulated and slower than fp32.
BF16 := $(shell grep -qE 'amx_bf16|avx512_bf16' /proc/cpuinfo 2>/dev/null && echo true || echo false)

# One thread per rank: the ranks of the tests and of the quickstart already fill the cores.
export OMP_NUM_THREADS ?= 1

.PHONY: help install quickstart notebooks docs reference families plans test test-slow test-float8 test-all style quality clean

help:
	@echo "make quickstart   train a small Llama on the standard library's source with 4 CPU ranks"
	@echo "make notebooks    execute the notebooks and save their outputs"
	@echo "make docs         build the documentation as a site in output/site"
	@echo "make reference    write docs/reference and the pictures of docs/concepts from the code"
	@echo "make families     try every model of transformers with the heads of eight tasks, write docs/families*.md"
	@echo "make plans        search plans of public models on five clusters, write them into docs/plans.md"
	@echo "make test         the fast tests"
	@echo "make test-slow    the slow tests"
	@echo "make test-float8  the tests of float8, after installing torchao"
	@echo "make test-all     the fast tests and the slow ones"
	@echo "make style        format the code and fix what ruff can fix"
	@echo "make quality      check formatting and lint, change nothing; report fast tests above 15 CPU seconds"

install: $(INSTALLED)

# torch goes first and alone, so that no other package's requirement picks a build of it.
$(INSTALLED): setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "$(PYTHON) is older than Python 3.11, which transformers needs: run make with PYTHON=python3.11 or later"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install $$(grep '^torch==' constraints.txt) $(if $(TORCH_INDEX_URL),--index-url $(TORCH_INDEX_URL))
	$(BIN)/python -m pip install -e '.[dev,notebooks,docs]' -c constraints.txt
	touch $@

quickstart: $(INSTALLED)
	$(BIN)/accelerate launch --config_file recipes/accelerate/cpu4.yaml recipes/train_clm.py \
		recipes/quickstart.yaml --bf16 $(BF16) --output_dir $(QUICKSTART_DIR)
	$(BIN)/python recipes/generate.py $(QUICKSTART_DIR)

notebooks: $(INSTALLED)
	$(BIN)/python notebooks/execute.py

# Material warns on every build of a later version of mkdocs, which constraints.txt keeps out.
docs: $(INSTALLED)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

reference: $(INSTALLED)
	$(BIN)/python docs/make_reference.py
	$(BIN)/python docs/make_diagrams.py

plans: $(INSTALLED)
	$(BIN)/python docs/make_plans.py

families: $(INSTALLED)
	$(BIN)/python docs/make_families.py

test: $(INSTALLED)
	$(PYTEST) -m "not slow" --cpu-seconds=$(CPU_SECONDS)/fast.txt $(PYTEST_ARGS)

test-slow: $(INSTALLED)
	$(PYTEST) -m slow --cpu-seconds=$(CPU_SECONDS)/slow.txt $(PYTEST_ARGS)

# Apart, because torchao says on every start on a machine without a GPU which of its libraries it cannot load.
test-float8: $(INSTALLED)
	$(BIN)/python -m pip install -e '.[float8]' -c constraints.txt
	$(PYTEST) tests/test_float8.py $(PYTEST_ARGS)

test-all: test test-slow

style: $(INSTALLED)
	$(BIN)/ruff check --fix $(wildcard $(CHECKED_DIRS))
	$(BIN)/ruff format $(wildcard $(CHECKED_DIRS))

quality: $(INSTALLED)
	$(BIN)/ruff check $(wildcard $(CHECKED_DIRS))
	$(BIN)/ruff format --check $(wildcard $(CHECKED_DIRS))
	@$(BIN)/python tests/cpu_seconds.py $(CPU_SECONDS)/fast.txt

clean:
	rm -rf build dist .pytest_cache .ruff_cache .hypothesis output
