"""BERT as Google released it: bert_config.json, vocab.txt, and a TensorFlow 1 checkpoint."""

import pathlib

from bert_jax.interop.huggingface import config_from_huggingface, huggingface_name
from bert_jax.interop.parameters import LoadedModel, loaded_model, read_json, read_parameters
from bert_jax.tokenization import load_tokenizer

# transformers took over Google's names but for these, and writes them with dots.
_PARAMETERS = {
    "bert/embeddings/token_embedding": "bert/embeddings/word_embeddings",
    "bert/embeddings/position_embedding": "bert/embeddings/position_embeddings",
    "bert/embeddings/segment_embedding": "bert/embeddings/token_type_embeddings",
    "mlm/bias": "cls/predictions/output_bias",
    "nsp/kernel": "cls/seq_relationship/output_weights",
    "nsp/bias": "cls/seq_relationship/output_bias",
}
_LEAVES = {"kernel": "kernel", "scale": "gamma", "bias": "bias"}


def google_name(path: str) -> str:
    """A path in the parameter tree -> Google's name, with `{layer}` where it is stacked."""
    if path in _PARAMETERS:
        return _PARAMETERS[path]
    module = huggingface_name(path).rpartition(".")[0].replace("layer.{layer}", "layer_{layer}")
    leaf = path.rpartition("/")[2]
    if module.endswith("LayerNorm") and leaf == "bias":
        return f"{module}.beta".replace(".", "/")
    return f"{module}.{_LEAVES[leaf]}".replace(".", "/")


def load_google(directory: pathlib.Path) -> LoadedModel:
    """Config, weights and vocabulary of a directory as released in 2018; TensorFlow must be there.

    The checkpoint is the only `*.ckpt*.index`, as bert_model.ckpt.index. The optimizer's slots and
    the step are reported as unused.

    Raises:
      FileNotFoundError: a file is missing.
      ImportError: TensorFlow is not installed.
      ValueError: there are several checkpoints, or a file is damaged, of another architecture, or
        does not fit the others.
    """
    # The fields that both have are named alike, and what only transformers has is the same here.
    config = config_from_huggingface(read_json(directory / "bert_config.json"))
    tokenizer = load_tokenizer(directory / "vocab.txt")
    found = sorted(directory.glob("*.ckpt*.index"))
    if not found:
        raise FileNotFoundError(f"no such file: {directory / 'bert_model.ckpt.index'}")
    if len(found) > 1:
        names = ", ".join(path.name for path in found)
        raise ValueError(
            f"{directory}: expected one checkpoint, found {names}: leave the one to read there"
        )
    checkpoint = found[0].with_suffix("")
    try:
        import tensorflow as tf
    except ImportError as error:
        raise ImportError(
            f"{checkpoint} can be read by TensorFlow only: pip install tensorflow-cpu"
        ) from error
    try:
        reader = tf.train.load_checkpoint(str(checkpoint))
        params, report = read_parameters(
            config,
            None,
            {name: name for name in sorted(reader.get_variable_to_shape_map())},
            reader.get_tensor,
            name_of=google_name,
            transposed=lambda path: path == "nsp/kernel",
        )
    except (ValueError, RuntimeError, tf.errors.OpError) as error:
        raise ValueError(f"{checkpoint}: {error}") from error
    return loaded_model(directory, config, None, params, tokenizer, report)
