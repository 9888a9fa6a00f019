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
    from bert_jax.fitting import fit
    from bert_jax.inference.pretrained_model import PretrainedModel, load
    from bert_jax.model.config import BertConfig
    from bert_jax.tasks.search import search

    __version__: str
else:
    # Hidden from type checkers, which would take it for an answer to any name.
    def __getattr__(name: str):
        # Imported on first use: the corpus tools start many processes that do not need JAX.
        if name == "__version__":
            from importlib.metadata import version

            return version("bert_jax")
        modules = {
            "BertConfig": "bert_jax.model.config",
            "PretrainedModel": "bert_jax.inference.pretrained_model",
            "fit": "bert_jax.fitting",
            "load": "bert_jax.inference.pretrained_model",
            "search": "bert_jax.tasks.search",
        }
        if name not in modules:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return getattr(importlib.import_module(modules[name]), name)


__all__ = ["BertConfig", "PretrainedModel", "__version__", "fit", "load", "search"]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})  # So that completion finds them before their first use.
