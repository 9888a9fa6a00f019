"""Reads and writes what sentence-transformers adds to an encoder: how a text becomes one vector.

A directory's `modules.json` lists the modules in order: the encoder, pooling, and any of dense
layers and normalization, each with a folder; for sparse vectors a masked LM, and its pooling. All
are read or refused by name: an encoder without them would give other vectors.
"""

import pathlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from bert_jax.checkpoints.tensors import read_tensors
from bert_jax.model.pooling import POOLINGS, SIMILARITIES, SPARSE_SIMILARITIES
from bert_jax.runtime.model_files import read_json, read_list, read_optional
from bert_jax.tokenizers.huggingface import CONFIG_FILENAME

MODULES_FILENAME = "modules.json"
MODEL_FILENAME = "config_sentence_transformers.json"
ENCODER_FILENAME = "sentence_bert_config.json"

# Keys of a pooling's config.json, in the order in which the vectors are joined.
_POOLING_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
# Names of torch's classes -> activations.
_ACTIVATIONS = {
    "Identity": "identity",
    "Tanh": "tanh",
    "ReLU": "relu",
    "GELU": "gelu",
    "Sigmoid": "sigmoid",
    "SiLU": "silu",
}
_TORCH_ACTIVATIONS = {
    name: f"torch.nn.modules.{'linear' if name == 'identity' else 'activation'}.{torch_name}"
    for torch_name, name in _ACTIVATIONS.items()
}
# All options of the modules and of the model, each with the supported values: others, and other
# options, would change the vectors. None: any value, which is read or changes nothing.
_MODULE_OPTIONS = {
    "module_input_name": ("sentence_embedding",),
    "module_output_name": ("sentence_embedding", None),
}
DENSE_OPTIONS = _MODULE_OPTIONS | {
    "use_residual": (False,),
    "in_features": None,
    "out_features": None,
    "bias": None,
    "activation_function": None,
}
_POOLING_OPTIONS = {
    "word_embedding_dimension": None,
    "embedding_dimension": None,
    "pooling_mode": None,
    "include_prompt": None,
    **dict.fromkeys(_POOLING_KEYS),
}
_HIDDEN_STATES = {"method": "forward", "method_output_name": "last_hidden_state"}
_NO_ARGUMENTS = ({}, None)
ENCODER_OPTIONS = {
    "max_seq_length": None,
    "do_lower_case": None,
    "unpad_inputs": None,
    "transformer_task": ("feature-extraction",),
    "modality_config": ({"text": _HIDDEN_STATES}, None),
    "module_output_name": ("token_embeddings",),
    "tokenizer_name_or_path": (None,),
    "query_length": (None,),
    "document_length": (None,),
    "query_expansion": (None,),
    "processing_kwargs": _NO_ARGUMENTS,
    # Arguments of transformers' functions, by their new and their old names.
    "model_kwargs": _NO_ARGUMENTS,
    "processor_kwargs": _NO_ARGUMENTS,
    "config_kwargs": _NO_ARGUMENTS,
    "model_args": _NO_ARGUMENTS,
    "tokenizer_args": _NO_ARGUMENTS,
    "config_args": _NO_ARGUMENTS,
}
_MODEL_OPTIONS = {
    "__version__": None,
    "prompts": None,
    "default_prompt_name": None,
    "similarity_fn_name": (*SIMILARITIES, None),
    "model_type": ("SentenceTransformer",),
    "truncate_dim": None,
}
_SCORES = {"method": "forward", "method_output_name": "logits"}
_CROSS_ENCODER_OPTIONS = ENCODER_OPTIONS | {
    "transformer_task": ("sequence-classification",),
    "modality_config": ({"text": _SCORES}, None),
    "module_output_name": ("scores",),
}
# Of sparse vectors, whose `Transformer` was once called `MLMTransformer`.
_MASKED_LM_OPTIONS = ENCODER_OPTIONS | {
    "transformer_task": ("fill-mask",),
    "modality_config": ({"text": _SCORES}, None),
}
_SPLADE_OPTIONS = {
    "pooling_strategy": ("max", "sum"),
    "activation_function": ("relu", "log1p_relu"),
    "embedding_dimension": None,
    "word_embedding_dimension": None,
    "chunk_size": None,
}
_SPARSE_MODEL_OPTIONS = {
    "__version__": None,
    "prompts": None,
    "default_prompt_name": None,
    "similarity_fn_name": (*SPARSE_SIMILARITIES, None),
    "model_type": ("SparseEncoder",),
    "max_active_dims": None,
}


class EmbeddingModules(NamedTuple):
    """What `modules.json` describes.

    Attributes:
      encoder: the directory of the encoder.
      head: settings of an "embedding" head: pooling, normalize, and where present projections,
        max_seq_length, prompt and prompts; or of a "multi_vector" head, of which only the lengths
        may be missing; or of a "sparse_embedding" head; None for an encoder alone.
      tensors: of the projections, as `projection_N.weight` and `.bias`.
      lower_cases: whether texts are lower-cased before the tokenizer reads them.
      is_cross_encoder: whether the encoder has a head that scores pairs, in `config.json`.
      max_seq_length: of a cross-encoder, where it is known.
      markers: of a multi-vector model, what precedes texts and is one token.
      taken: names of those tensors beside the encoder's that are in `tensors`.
    """

    encoder: pathlib.Path
    head: dict | None
    tensors: dict[str, np.ndarray]
    lower_cases: bool
    is_cross_encoder: bool = False
    max_seq_length: int | None = None
    markers: tuple[str, ...] = ()
    taken: tuple[str, ...] = ()


def read_modules(directory: pathlib.Path) -> EmbeddingModules:
    """Reads `modules.json` and what it refers to. Raises ValueError for what is not supported."""
    try:
        return _read_modules(directory)
    except (KeyError, TypeError) as error:
        reason = f"the modules of {directory} are not as sentence-transformers writes them"
        raise ValueError(f"{reason}: {error!r}") from error


def _read_modules(directory: pathlib.Path) -> EmbeddingModules:
    path, modules = directory / MODULES_FILENAME, []
    for module in read_list(path):
        package, _, name = module["type"].rpartition(".")
        is_theirs = package.partition(".")[0] == "sentence_transformers"
        # A module of another package may compute anything.
        modules.append((name if is_theirs else module["type"], directory / module.get("path", "")))
    names = [name for name, _ in modules]
    if names in (["Transformer", "SpladePooling"], ["MLMTransformer", "SpladePooling"]):
        return _read_sparse_modules(directory, modules)
    is_known = names[:1] == ["Transformer"] and names[1:2] in ([], ["Pooling"])
    if not is_known or not {*names[2:]} <= {"Dense", "Dropout", "Normalize"}:
        raise ValueError(
            f"{path} lists the modules {', '.join(names)}; expected Transformer and Pooling, then "
            "any of Dense, Dropout and Normalize, or Transformer and SpladePooling: remove the "
            "file to read the encoder alone"
        )
    if "Normalize" in names and "Dense" in names[names.index("Normalize") :]:
        fix = "remove the file to read the encoder alone"
        raise ValueError(f"{path}: a Dense module after Normalize is not supported: {fix}")
    encoder = modules[0][1]
    encoder_path = next(encoder.glob("sentence_*_config.json"), encoder / ENCODER_FILENAME)
    model_path = directory / MODEL_FILENAME
    if read_optional(model_path).get("model_type") == "CrossEncoder" and len(modules) == 1:
        options = read_options(encoder_path, _CROSS_ENCODER_OPTIONS)
        check_activation(read_optional(model_path).get("activation_fn"), model_path)
        lower_cases = bool(options.get("do_lower_case"))
        limit = read_limit(encoder_path, "max_seq_length")
        return EmbeddingModules(encoder, None, {}, lower_cases, True, limit)
    options = read_options(encoder_path, ENCODER_OPTIONS)
    lower_cases = bool(options.get("do_lower_case"))
    if len(modules) == 1:
        return EmbeddingModules(encoder, None, {}, lower_cases)
    head = {"task": "embedding", "labels": [], "normalize": "Normalize" in names}
    head |= _read_max_seq_length(encoder, encoder_path)
    head |= _read_pooling(modules[1][1] / "config.json", model_path)
    options = read_options(model_path, _MODEL_OPTIONS)
    if (size := options.get("truncate_dim")) is not None:
        head["truncate_dim"] = size
    similarity = options.get("similarity_fn_name") or "cosine"
    if similarity != similarity_of(head):
        head["similarity"] = similarity
    projections, tensors = [], {}
    for name, folder in modules[2:]:
        if name == "Normalize":
            read_options(folder / "config.json", _MODULE_OPTIONS)
        if name == "Dense":
            for stored, tensor in read_tensors(folder).items():
                leaf = stored.removeprefix("linear.")
                tensors[f"projection_{len(projections)}.{leaf}"] = tensor
            projections.append(read_dense(folder / "config.json"))
    if projections:
        head["projections"] = projections
    return EmbeddingModules(encoder, head, tensors, lower_cases)


def _read_sparse_modules(
    directory: pathlib.Path, modules: Sequence[tuple[str, pathlib.Path]]
) -> EmbeddingModules:
    """Reads a masked LM and its pooling, of sparse vectors."""
    (name, encoder), (_, pooling) = modules
    encoder_path = next(encoder.glob("sentence_*_config.json"), encoder / ENCODER_FILENAME)
    options = read_options(encoder_path, _MASKED_LM_OPTIONS)
    if name == "Transformer" and "transformer_task" not in options:
        raise ValueError(f"{encoder_path}: transformer_task is not set, expected 'fill-mask'")
    head = {"task": "sparse_embedding", "labels": []}
    head |= _read_max_seq_length(encoder, encoder_path)
    values = read_module(pooling / "config.json")
    check_options(pooling / "config.json", values, _SPLADE_OPTIONS)
    for key, option, default in (
        ("pooling_strategy", "pooling", "max"),
        ("activation_function", "activation", "relu"),
    ):
        if values.get(key, default) != default:
            head[option] = values[key]
    model_path = directory / MODEL_FILENAME
    of_model = read_options(model_path, _SPARSE_MODEL_OPTIONS)
    head |= _read_prompts(of_model)
    if (top_k := of_model.get("max_active_dims")) is not None:
        if type(top_k) is not int or top_k < 1:
            raise ValueError(f"{model_path}: max_active_dims is {top_k!r}, expected 1 or more")
        head["top_k"] = top_k
    similarity = of_model.get("similarity_fn_name") or similarity_of(head)
    if similarity != similarity_of(head):
        head["similarity"] = similarity
    return EmbeddingModules(encoder, head, {}, bool(options.get("do_lower_case")))


def _read_max_seq_length(encoder: pathlib.Path, encoder_path: pathlib.Path) -> dict:
    """Returns the "max_seq_length" of a head; empty if it is not known."""
    if (limit := read_limit(encoder_path, "max_seq_length")) is None:
        limit = read_limit(encoder / CONFIG_FILENAME, "model_max_length")
    return {} if limit is None else {"max_seq_length": limit}


def check_activation(name: str | None, path: pathlib.Path) -> None:
    """Raises ValueError unless the scores of a cross-encoder are its logits, or their sigmoid.

    Both have the same order; bert_jax gives the logits.
    """
    if name is not None and name.rpartition(".")[2] not in ("Identity", "Sigmoid"):
        fix = "expected Identity or Sigmoid, which keep the order of the logits"
        raise ValueError(f"{path}: activation_fn is {name}, {fix}")


def similarity_of(head: Mapping) -> str:
    """Returns the one of `SIMILARITIES` that a head for vectors is used with.

    Sparse vectors, which have no option to be normalized, are compared by dot products.
    """
    return head.get("similarity") or ("cosine" if head.get("normalize") else "dot")


def read_limit(path: pathlib.Path, name: str) -> int | None:
    """Reads a maximum number of tokens. Raises ValueError if no token of a text would fit in it."""
    limit = read_optional(path).get(name)
    if limit is None:
        return None
    if not isinstance(limit, int | float) or limit < 3:
        expected = "a number of tokens from 3, since [CLS] and [SEP] count"
        raise ValueError(f"{path}: {name} is {limit!r}, expected {expected}")
    return int(limit)


def _read_pooling(path: pathlib.Path, model_path: pathlib.Path) -> dict:
    """Returns the "pooling" of the head, its "prompts", and the "prompt" that each text gets."""
    values = read_module(path)
    old_names = [name for key, name in _POOLING_KEYS.items() if values.get(key)]
    poolings = values.get("pooling_mode", old_names or "mean")
    poolings = [poolings] if isinstance(poolings, str) else list(poolings)
    unknown = [name for name in poolings if name not in POOLINGS]
    # Newer versions may add a `pooling_mode_...`.
    new = [key for key in values if key.startswith("pooling_mode_") and key not in _POOLING_KEYS]
    unknown += [key for key in new if values[key]]
    if unknown or not poolings:
        expected = ", ".join(POOLINGS)
        raise ValueError(f"{path}: pooling {unknown} is not supported, expected {expected}")
    check_options(path, values, _POOLING_OPTIONS | dict.fromkeys(new))
    options = read_options(model_path, _MODEL_OPTIONS)
    if any((options.get("prompts") or {}).values()) and not values.get("include_prompt", True):
        fix = f"remove prompts and default_prompt_name from {model_path.name}"
        raise ValueError(f"{path}: include_prompt=False is not supported with a prompt: {fix}")
    return {"pooling": poolings[0] if len(poolings) == 1 else poolings} | _read_prompts(options)


def _read_prompts(options: Mapping) -> dict:
    """Returns the "prompts" of a head, and the "prompt" that each text gets, where it has them."""
    prompts, default_name = options.get("prompts") or {}, options.get("default_prompt_name")
    head = {}
    if prompt := prompts.get(default_name):
        head["prompt"] = prompt
    # Those that a caller may name: their tokens are pooled, too.
    if any(prompts.values()) and prompts.keys() != {default_name}:
        head["prompts"] = prompts
    return head


def read_dense(path: pathlib.Path, supported: Mapping[str, tuple | None] = DENSE_OPTIONS) -> dict:
    """Returns the fields of a `Projection`."""
    values = read_module(path)
    check_options(path, values, supported)
    name = str(values.get("activation_function", "torch.nn.modules.activation.Tanh"))
    activation = _ACTIVATIONS.get(name.rpartition(".")[2])
    if activation is None or not name.startswith("torch.nn."):
        expected = ", ".join(_ACTIVATIONS)
        raise ValueError(f"{path}: activation_function is {name}, expected one of {expected}")
    has_bias = bool(values.get("bias", True))
    return {"size": values["out_features"], "has_bias": has_bias, "activation": activation}


def read_module(path: pathlib.Path) -> dict:
    """Reads the configuration of a module. Raises FileNotFoundError if it is missing."""
    if not path.exists():
        fix = "copy it from the place that the model comes from"
        raise FileNotFoundError(f"{MODULES_FILENAME} needs {path}, which does not exist: {fix}")
    return read_json(path)


def read_options(path: pathlib.Path, supported: Mapping[str, tuple | None]) -> dict:
    """Reads a JSON file, empty if it does not exist. Raises as `check_options`."""
    values = read_optional(path)
    check_options(path, values, supported)
    return values


def check_options(
    path: pathlib.Path, values: Mapping, supported: Mapping[str, tuple | None]
) -> None:
    """Raises ValueError for an option that is not supported, or another value of one that is."""
    for name, value in values.items():
        if name not in supported:
            fix = "remove it if the vectors do not depend on it"
            raise ValueError(f"{path}: the option {name}={value!r:.100} is not supported: {fix}")
        allowed = supported[name]
        if allowed is not None and value not in allowed:
            expected = " or ".join(map(repr, allowed))
            raise ValueError(f"{path}: {name} is {value!r:.100}, expected {expected}")


def dense_config(input_size: int, projection: Mapping) -> dict:
    """Returns the configuration of a dense layer, from the fields of its `Projection`."""
    return {
        "in_features": input_size,
        "out_features": projection["size"],
        "bias": projection["has_bias"],
        "activation_function": _TORCH_ACTIVATIONS[projection["activation"]],
    }


def embedding_files(hidden_size: int, head: Mapping) -> dict[str, list | dict]:
    """Returns the JSON files, by name, that `SentenceTransformer` needs for an "embedding" head.

    It truncates queries to the length of passages, `head["max_seq_length"]` tokens.
    """
    poolings = [head["pooling"]] if isinstance(head["pooling"], str) else head["pooling"]
    modules = [("Transformer", ""), ("Pooling", "1_Pooling")]
    files = {
        ENCODER_FILENAME: {"max_seq_length": head["max_seq_length"]},
        MODEL_FILENAME: {"similarity_fn_name": similarity_of(head)},
        "1_Pooling/config.json": {
            "word_embedding_dimension": hidden_size,
            **{
                key: name in poolings
                for key, name in _POOLING_KEYS.items()
                if name in ("cls", "mean", *poolings)
            },
        },
    }
    files[MODEL_FILENAME] |= _prompt_options(head)
    if "truncate_dim" in head:
        files[MODEL_FILENAME]["truncate_dim"] = head["truncate_dim"]
    size = len(poolings) * hidden_size
    for projection in head.get("projections", ()):
        modules.append(("Dense", f"{len(modules)}_Dense"))
        files[f"{modules[-1][1]}/config.json"] = dense_config(size, projection)
        size = projection["size"]
    if head["normalize"]:
        modules.append(("Normalize", f"{len(modules)}_Normalize"))
    files[MODULES_FILENAME] = list_modules("sentence_transformers.models.", modules)
    return files


def sparse_embedding_files(head: Mapping) -> dict[str, list | dict]:
    """Returns the JSON files that `SparseEncoder` needs for a "sparse_embedding" head.

    The names of the modules are those of its first version, which later ones know, too. It
    truncates queries to the length of passages.
    """
    modules = [("MLMTransformer", ""), ("SpladePooling", "1_SpladePooling")]
    model = {"model_type": "SparseEncoder", "similarity_fn_name": similarity_of(head)}
    if "top_k" in head:
        model["max_active_dims"] = head["top_k"]
    return {
        ENCODER_FILENAME: {"max_seq_length": head["max_seq_length"]},
        MODEL_FILENAME: model | _prompt_options(head),
        "1_SpladePooling/config.json": {
            "pooling_strategy": head.get("pooling", "max"),
            "activation_function": head.get("activation", "relu"),
        },
        MODULES_FILENAME: list_modules("sentence_transformers.sparse_encoder.models.", modules),
    }


def _prompt_options(head: Mapping) -> dict:
    """Returns the options of the model that have the prompts of a head."""
    prompts, options = dict(head.get("prompts", {})), {}
    if prompt := head.get("prompt"):
        name = next((name for name, text in prompts.items() if text == prompt), "default")
        prompts[name] = prompt
        options["default_prompt_name"] = name
    return options | ({"prompts": prompts} if prompts else {})


def list_modules(package: str, modules: Sequence[tuple[str, str]]) -> list[dict]:
    """Returns the contents of `modules.json`, of the names of the modules and their folders.

    `package` is what precedes the names, such as "sentence_transformers.models."; "": nothing.
    """
    return [
        {"idx": i, "name": f"{i}", "path": path, "type": f"{package}{name}"}
        for i, (name, path) in enumerate(modules)
    ]
