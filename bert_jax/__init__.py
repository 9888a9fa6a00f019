"""BERT in JAX: raw text to a pre-trained model, on one CPU or a TPU pod."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from bert_jax.config import BertConfig
    from bert_jax.inference import load

__all__ = ["BertConfig", "load"]


def __getattr__(name: str):
    # Imported on first use: the corpus tools run many processes that have no need of JAX.
    if name == "BertConfig":
        from bert_jax.config import BertConfig

        return BertConfig
    if name == "load":
        from bert_jax.inference import load

        return load
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
