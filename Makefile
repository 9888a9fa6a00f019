# Installs into .venv inside this clone (libraries to compare with: .venv-parity, .venv-keras,
# .venv-onnx); data and the demo's run are in runs/.
PYTHON ?= python3
BIN := .venv/bin
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest --numprocesses 3 --dist loadfile \
	--no-loadscope-reorder
export PYTHONUNBUFFERED := 1

.PHONY: demo docs fresh-machine notebooks test test-all types slow-tests exhaustive-tests parity tf-parity keras-parity faults report-test tpu-tables manifest-test bucket-test beam-test input-test lint lock clean

demo: .venv/installed
	$(BIN)/python tools/demo.py

# Makes the demo's model if it is not there. Then executes the notebooks in place, without progress
# bars, and the examples of docs/python_api.md with their models.
notebooks: .venv/notebooks demo
	for name in experiments/notebooks/*.ipynb; do \
		TQDM_DISABLE=1 $(BIN)/jupyter nbconvert --to notebook --execute --inplace --log-level WARN \
			--ClearMetadataPreprocessor.enabled=True $$name || exit 1; done
	$(BIN)/python -m doctest -o ELLIPSIS -o NORMALIZE_WHITESPACE docs/python_api.md

# Builds the documentation site; a warning, such as a broken link, is an error.
docs: .venv/docs
	JAX_PLATFORMS=cpu $(BIN)/python -m sphinx -E -W --keep-going -q -c docs . runs/site
	@echo "The site is in runs/site: open runs/site/index.html"

# The fast tier. It is to take at most 8 minutes on 2 cores: on 2026-11-30 it took 7 min 34 s on an AMD
# EPYC beside a compilation at low priority. Three workers, because some tests wait for programs that
# they start.
test: .venv/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(PYTEST) -m "not slow and not exhaustive"

# Checks the types that a user's editor sees, with ty: 38 MB and a second, where pyright with its Node.js
# takes 280 MB and a minute.
types: .venv/types
	$(BIN)/ty check --python .venv

# The two commands of the README, `make demo` and `make test`, on a minimal Debian 13 in a chroot.
# Needs root and debootstrap.
fresh-machine:
	.ci/fresh_machine demo test

# All tiers. The slow one kills processes at random and damages files. The exhaustive one, which CI
# does not run, repeats its tests with more values (every mesh with every optimizer, each victim), and
# has the longest runs of several processes.
test-all: test slow-tests exhaustive-tests

slow-tests: .venv/installed
	$(PYTEST) -m "slow and not exhaustive"

exhaustive-tests: .venv/installed
	$(PYTEST) -m exhaustive

# Compares with transformers in torch; downloads both, and the MiniLM weights. Also reads back what
# trackers store. With XQUAD=FILE (the English part of XQuAD) it also checks that features contain the
# answers of that file, with REPORTS=DIR that files of bug reports give the right values, and with
# FLAX=DIR that old Flax models do; see tests/parity/test_flax.py.
parity: .venv-parity/installed
	.venv-parity/bin/python tools/fetch_data.py minilm runs/data/minilm
	.venv-parity/bin/python tools/fetch_data.py squad-metrics runs/data/squad
	.venv-parity/bin/python tools/fetch_data.py conll2003 runs/data/conll2003
	.venv-parity/bin/python tools/fetch_data.py conlleval runs/data/conlleval
	JAX_PLATFORMS=cpu BERT_JAX_MINILM=runs/data/minilm \
		BERT_JAX_SQUAD_METRICS=runs/data/squad/squad_metrics.py \
		BERT_JAX_CONLL=runs/data/conll2003 BERT_JAX_CONLLEVAL=runs/data/conlleval/conlleval \
		BERT_JAX_XQUAD=$(XQUAD) $(if $(REPORTS),BERT_JAX_REPORTS=$(REPORTS)) \
		$(if $(FLAX),BERT_JAX_FLAX=$(FLAX)) \
		.venv-parity/bin/python -m pytest --override-ini addopts=--import-mode=importlib -v tests/parity

# Imports a checkpoint that TensorFlow writes; downloads TensorFlow.
tf-parity: .venv-parity/tensorflow
	JAX_PLATFORMS=cpu .venv-parity/bin/python -m pytest --override-ini addopts=--import-mode=importlib -v \
		tests/parity/test_google.py

# Compares with KerasHub on JAX; downloads it, and the TensorFlow that it needs.
keras-parity: .venv-keras/installed
	JAX_PLATFORMS=cpu .venv-keras/bin/python -m pytest --override-ini addopts=--import-mode=importlib -v \
		tests/parity/test_keras_hub.py

# Kills a run of two processes at 20 random moments, a sweep at 10, and the building of a corpus at 10.
faults: .venv/installed
	BERT_JAX_KILLS=10 $(BIN)/python -m pytest -s tests/corpus/test_build.py -k killed
	BERT_JAX_KILLS=20 JAX_PLATFORMS=cpu $(BIN)/python -m pytest -s tests/runtime/test_faults.py
	BERT_JAX_KILLS=10 JAX_PLATFORMS=cpu $(BIN)/python -m pytest -s -k killed tests/test_sweep.py

# The tests that need the TPU compiler, which it downloads.
report-test: .venv/compiler
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest tests/tools/test_tpu_report.py tests/tools/test_rent.py \
		tests/sharding/test_mesh.py

# Compiles what the tables of docs/tpu.md and its log show, for hours, and writes them. Stopped, it
# goes on with the next report.
tpu-tables: .venv/compiler
	JAX_PLATFORMS=cpu $(BIN)/python tools/tpu_tables.py

# Validates the JobSet of tools/launch_gke.py with the schemas of Kubernetes and JobSet.
JOBSET := https://raw.githubusercontent.com/kubernetes-sigs/jobset/v0.12.0
manifest-test: .venv/installed
	$(BIN)/pip install --quiet --editable ".[manifests]"
	mkdir -p runs/data
	curl --fail --silent --show-error --output runs/data/jobset.yaml \
		$(JOBSET)/config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml
	BERT_JAX_JOBSET_CRD=runs/data/jobset.yaml $(BIN)/python -m pytest -rs tests/pods/launch/test_jobset.py

# Runs on a bucket: an emulator of Cloud Storage, which this installs. Kills two of its runs.
bucket-test: .venv/installed
	$(BIN)/pip install --quiet --editable ".[buckets-test]"
	JAX_PLATFORMS=cpu $(BIN)/python -m pytest -rs tests/runtime/test_buckets.py

# Builds a corpus with Apache Beam on three runners, one of them a cluster of processes.
beam-test: .venv/beam
	$(BIN)/python -m pytest tests/corpus/test_beam.py

# Reads HTML, and a dataset with the library `datasets`; downloads both libraries.
input-test: .venv/input
	$(BIN)/python -m pytest -rs tests/corpus/test_input_forms.py

.venv/input: .venv/installed
	$(BIN)/pip install --quiet --editable ".[datasets,html]"
	touch $@

.venv/beam: .venv/installed
	$(BIN)/pip install --quiet --editable ".[dataflow]" dask distributed
	touch $@

.venv/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet --require-hashes --requirement requirements.lock
	$(BIN)/pip install --quiet --no-deps --editable .
	touch $@

.venv/compiler: .venv/installed
	$(BIN)/pip install --quiet --editable ".[tpu]"
	touch $@

.venv/docs: .venv/installed
	$(BIN)/pip install --quiet --editable ".[docs]"
	touch $@

.venv/types: .venv/installed
	$(BIN)/pip install --quiet --editable ".[types]"
	touch $@

.venv/notebooks: .venv/installed
	$(BIN)/pip install --quiet --editable ".[notebooks,baselines]"
	touch $@
	@echo "To open the notebooks: $(BIN)/jupyter lab experiments/notebooks"

.venv-parity/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-parity
	.venv-parity/bin/pip install --quiet --require-hashes --requirement requirements.lock
	.venv-parity/bin/pip install --quiet --editable ".[comparison,onnx,trackers]"
	touch $@

.venv-parity/tensorflow: .venv-parity/installed
	.venv-parity/bin/pip install --quiet --editable ".[comparison,google]"
	touch $@

# KerasHub with its JAX backend, for benchmarks/ and `make keras-parity`.
.venv-keras/installed: requirements.lock pyproject.toml
	$(PYTHON) -m venv .venv-keras
	.venv-keras/bin/pip install --quiet --require-hashes --requirement requirements.lock
	.venv-keras/bin/pip install --quiet --editable ".[keras]"
	touch $@

# The ONNX backend of sentence-transformers, for benchmarks/encode.py: it needs transformers 4, and so
# older packages than bert_jax, which is not installed here.
.venv-onnx/installed: benchmarks/onnx_requirements.txt
	$(PYTHON) -m venv .venv-onnx
	.venv-onnx/bin/pip install --quiet --requirement benchmarks/onnx_requirements.txt
	touch $@

lint: .venv/installed
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

# Pins the newest versions that pyproject.toml allows, with hashes.
lock:
	uv pip compile pyproject.toml --extra test --universal --python-version 3.11 \
		--generate-hashes --no-header --no-emit-index-url --no-annotate --output-file requirements.lock

clean:
	rm -rf .venv .venv-parity .venv-keras .venv-onnx runs
