"""Eight simulated devices for every test, and one small corpus."""

import os

# Before JAX is first imported.
os.environ["JAX_PLATFORMS"] = "cpu"
# Compiling takes longer than running what tests run: leave the CPU code unoptimised, but where
# `make parity` measures what users run.
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        "--xla_force_host_platform_device_count=8",
        *([] if "BERT_JAX_MINILM" in os.environ else ["--xla_backend_optimization_level=0"]),
    ]
)

import pathlib
import signal
import tempfile

import pytest

from tests import helpers

# Tests and the processes that they start compile the same small programs again and again: all that
# one call of pytest compiles is kept for it, whichever worker compiled it.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    compiled = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = compiled.name
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"

# What a shell starts in the background ignores Ctrl-C, and hands that on to what tests start.
signal.signal(signal.SIGINT, signal.default_int_handler)

LONGEST = (
    *("test_train.py", "test_faults.py", "test_pretrain.py", "test_finetune.py"),
    *("test_bad_input.py", "test_task_step.py", "test_distributed.py", "test_checkpoint.py"),
)


def pytest_collection_modifyitems(items):
    """The longest files first, so that none runs alone at the end."""
    names = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: names.get(item.path.name, len(names)))


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> pathlib.Path:
    return helpers.build_small_corpus(tmp_path_factory.mktemp("corpus64"))


@pytest.fixture(scope="session")
def long_corpus(tmp_path_factory) -> pathlib.Path:
    return helpers.build_small_corpus(tmp_path_factory.mktemp("corpus128"), max_seq_length=128)
