"""BERT in JAX: from raw text to a pre-trained model, on one CPU or a TPU pod."""

import glob
import importlib
import os
from typing import TYPE_CHECKING

# Without a TPU, libtpu logs long warnings unless these are set.
if not glob.glob("/dev/accel*") and not glob.glob("/dev/vfio/*"):
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v4-8")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")

if TYPE_CHECKING:
    from bert_jax.inference import load
    from bert_jax.model.config import BertConfig

__all__ = ["BertConfig", "load"]


def __getattr__(name: str):
    # Imported on first use: the corpus tools start many processes that do not need JAX.
    modules = {"BertConfig": "bert_jax.model.config", "load": "bert_jax.inference"}
    if name not in modules:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(modules[name]), name)
