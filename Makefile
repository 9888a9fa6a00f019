# Everything is kept in .venv (or .venv-parity), inside this clone; the demo in runs/.
PYTHON ?= python3
BIN := .venv/bin
export PYTHONUNBUFFERED := 1

.PHONY: demo test parity tf-parity faults report-test lint lock clean

demo: .venv/installed
	$(BIN)/python tools/demo.py

test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest --numprocesses 2 --dist loadfile \
		--no-loadscope-reorder

# Compares with transformers in torch; downloads both, and the MiniLM weights. With XQUAD=FILE, the
# English part of XQuAD, its answers are looked for in their features, too.
parity: .venv-parity/installed
	.venv-parity/bin/python tools/fetch_data.py minilm runs/data/minilm
	.venv-parity/bin/python tools/fetch_data.py squad-metrics runs/data/squad
	.venv-parity/bin/python tools/fetch_data.py conll2003 runs/data/conll2003
	.venv-parity/bin/python tools/fetch_data.py conlleval runs/data/conlleval
	JAX_PLATFORMS=cpu BERT_JAX_MINILM=runs/data/minilm \
		BERT_JAX_SQUAD_METRICS=runs/data/squad/squad_metrics.py \
		BERT_JAX_CONLL=runs/data/conll2003 BERT_JAX_CONLLEVAL=runs/data/conlleval/conlleval \
		BERT_JAX_XQUAD=$(XQUAD) \
		.venv-parity/bin/python -m pytest --override-ini addopts= -v tests/parity

# Imports a checkpoint that TensorFlow writes; downloads TensorFlow.
tf-parity: .venv-parity/tensorflow
	JAX_PLATFORMS=cpu .venv-parity/bin/python -m pytest --override-ini addopts= -v \
		tests/parity/test_interop.py -k tensorflow

# Kills a run of two processes at 20 random moments; a few minutes.
faults: .venv/installed
	BERT_JAX_KILLS=20 JAX_PLATFORMS=cpu $(BIN)/python -m pytest -s tests/test_faults.py

# What `make test` leaves out where there is no TPU compiler; downloads it.
report-test: .venv/compiler
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/test_tpu_report.py

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

.venv/compiler: .venv/installed
	$(BIN)/pip install --quiet --editable ".[tpu]"
	touch $@

.venv-parity/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/pip install --quiet --require-hashes --requirement requirements.lock
	.venv-parity/bin/pip install --quiet --editable ".[comparison]"
	touch $@

.venv-parity/tensorflow: .venv-parity/installed
	.venv-parity/bin/pip install --quiet --editable ".[comparison,google]"
	touch $@

lint: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pins what pyproject.toml asks for, with hashes, to what is newest now.
lock:
	uv pip compile pyproject.toml --extra test --universal --python-version 3.11 \
		--generate-hashes --no-header --no-emit-index-url --no-annotate --output-file requirements.lock

clean:
	rm -rf .venv .venv-parity runs
