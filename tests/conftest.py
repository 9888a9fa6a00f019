"""Eight simulated devices for every test, and small corpora."""

import gc
import importlib.metadata
import os
import subprocess
import sys
import tempfile

# Before JAX is first imported.
os.environ["JAX_PLATFORMS"] = "cpu"
# If this is not set, a program that a test starts restarts itself to get larger pages.
os.environ.setdefault("GLIBC_TUNABLES", "")
if "PYTEST_XDIST_WORKER" not in os.environ:  # A worker has the flags of the main process.
    os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "")
    os.environ["XLA_FLAGS"] += " --xla_force_host_platform_device_count=8"
    # Compilation takes longer than the computations of the tests; these flags halve the
    # compile time of the update step. Not for `make parity`, which measures what users run.
    if "BERT_JAX_MINILM" not in os.environ:
        os.environ["XLA_FLAGS"] += (
            " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
        )
        # Later versions have no such flag.
        if importlib.metadata.version("jaxlib").startswith("0.10."):
            os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

# Tests and the processes that they start compile the same small programs: all workers of one pytest
# run share a compilation cache.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    cache = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

import pathlib
import signal

import jax
import psutil
import pytest

from bert_jax.finetuning import finetune_setup
from bert_jax.sharding import mesh
from bert_jax.training import pretrain_setup
from tests.helpers.corpora import build_small_corpus

# So that failures show the values.
pytest.register_assert_rewrite("tests.helpers.predict_equals_load", "tests.suites")

# Tracing creates many objects and little garbage: collect it less often.
gc.freeze()
gc.set_threshold(100_000, 20, 20)

# A background job of a shell ignores Ctrl-C, and so would the processes that tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    "test_distributed.py",
    "test_finetune.py",
    "test_sweep.py",
    "test_pretrain_step.py",
    "test_faults.py",
    "test_pretrain.py",
    "test_bad_input.py",
    "test_step.py",
    "test_layer_loop.py",
    "test_attention_kernel.py",
    "test_feature_based.py",
    "test_native.py",
)


def pytest_sessionstart(session):
    """Ends the session with XLA's message if it does not accept `XLA_FLAGS`.

    It would abort the process, and in a worker of xdist nobody would see why.
    """
    if "PYTEST_XDIST_WORKER" in os.environ:
        return
    command = [sys.executable, "-c", "import jax; jax.devices()"]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        pytest.exit(f"XLA_FLAGS={os.environ['XLA_FLAGS']}:\n{result.stderr[-2000:]}", returncode=2)


def pytest_collection_modifyitems(items):
    """Runs the longest files first, so that none of them runs alone at the end."""
    order = {name: position for position, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="module", autouse=True)
def free_compiled_programs():
    """Frees compiled programs at the end of a module, where needed to stay under 3 GB."""
    yield
    if psutil.Process().memory_info().rss > 2 * 2**30:
        jax.clear_caches()


@pytest.fixture(scope="module")
def two_devices():
    """Runs on two of the eight devices: saving an array compiles a program for each of them."""

    def make_mesh_of_two(devices=None, **sizes):
        return mesh.make_mesh(**sizes, devices=devices or jax.devices()[:2])

    with pytest.MonkeyPatch.context() as patch:
        for setup in (pretrain_setup, finetune_setup):
            patch.setattr(setup, "make_mesh", make_mesh_of_two)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> pathlib.Path:
    return build_small_corpus(tmp_path_factory.mktemp("corpus64"))


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory) -> pathlib.Path:
    return build_small_corpus(tmp_path_factory.mktemp("corpus128"), max_seq_length=128)
