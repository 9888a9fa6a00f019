"""Reads and writes multi-vector models as sentence-transformers, PyLate and ColBERT store them.

MultiVectorEncoder of sentence-transformers has the modules Transformer, any of Dense,
MultiVectorMask and Normalize. PyLate (ColBERT in `model_type`) has Transformer and Dense, and the
rest in keys of one file; Stanford's ColBERT (HF_ColBERT) has the dense layer among the tensors of
the encoder, and the rest in `artifact.metadata`. Both are interpreted as sentence-transformers
does. All options are read or refused by name.
"""

import pathlib
import string
from collections.abc import Mapping

from bert_jax.checkpoints.sentence_transformers import (
    DENSE_OPTIONS,
    ENCODER_FILENAME,
    ENCODER_OPTIONS,
    MODEL_FILENAME,
    MODULES_FILENAME,
    EmbeddingModules,
    check_options,
    dense_config,
    list_modules,
    read_dense,
    read_limit,
    read_module,
    read_options,
)
from bert_jax.checkpoints.tensors import read_tensors
from bert_jax.runtime.model_files import read_list, read_optional
from bert_jax.tokenizers.huggingface import CONFIG_FILENAME

STANFORD_FILENAME = "artifact.metadata"
STANFORD_CLASS = "HF_ColBERT"
PYLATE_TYPE = "ColBERT"
_PLACE = "token_embeddings"
_PYLATE_DENSE = "pylate.models.Dense.Dense"
_MASK_OPTIONS = {
    "skiplist_words": None,
    "skiplist_tasks": (["document"], "document"),
    "keep_only_token_ids": (None, []),
}
_NORMALIZE_OPTIONS = {"module_input_name": (_PLACE,), "module_output_name": (_PLACE, None)}
_ENCODER_OPTIONS = ENCODER_OPTIONS | {
    "query_length": None,
    "document_length": None,
    "query_expansion": None,
}
_MODEL_OPTIONS = {
    "__version__": None,
    "prompts": None,
    "default_prompt_name": (None,),
    "similarity_fn_name": ("maxsim", "meanmaxsim", None),
    "model_type": ("MultiVectorEncoder",),
}
# PyLate compares by MaxSim, whatever the name of the similarity.
_PYLATE_OPTIONS = _MODEL_OPTIONS | {
    "similarity_fn_name": None,
    "model_type": (PYLATE_TYPE,),
    "query_prefix": None,
    "document_prefix": None,
    "query_length": None,
    "document_length": None,
    "do_query_expansion": (True, False, None),
    "attend_to_expansion_tokens": (True, False, None),
    "skiplist_words": None,
}
_EXPANSION_OPTIONS = {
    "strategy": ("fixed", "min"),
    "length": None,
    "attend": (True, False),
    "token": None,
}


def is_multi_vector(directory: pathlib.Path) -> bool:
    """Returns whether a directory with `modules.json` is one of MultiVectorEncoder or PyLate."""
    kind = read_optional(directory / MODEL_FILENAME).get("model_type")
    return kind in ("MultiVectorEncoder", PYLATE_TYPE)


def read_multi_vector(directory: pathlib.Path) -> EmbeddingModules:
    """Reads `modules.json` and what it refers to. Raises ValueError for what is not supported."""
    try:
        return _read_multi_vector(directory)
    except (AttributeError, KeyError, TypeError) as error:
        reason = f"the modules of {directory} are not as their library writes them"
        raise ValueError(f"{reason}: {error!r}") from error


def _read_multi_vector(directory: pathlib.Path) -> EmbeddingModules:
    path, model_path = directory / MODULES_FILENAME, directory / MODEL_FILENAME
    modules = []
    for module in read_list(path):
        name = module["type"].rpartition(".")[2]
        is_theirs = module["type"].startswith("sentence_transformers.")
        is_theirs |= module["type"] == _PYLATE_DENSE
        # A module of another package may compute anything.
        modules.append((name if is_theirs else module["type"], directory / module.get("path", "")))
    names = [name for name, _ in modules]
    num_dense = names.count("Dense")
    rest = names[1 + num_dense :]
    is_pylate = read_optional(model_path).get("model_type") == PYLATE_TYPE
    expected = [] if is_pylate else ["MultiVectorMask", *["Normalize"] * ("Normalize" in rest)]
    if names[: 1 + num_dense] != ["Transformer", *["Dense"] * num_dense] or (
        sorted(rest) != expected
    ):
        what = "" if is_pylate else ", MultiVectorMask, and perhaps Normalize"
        raise ValueError(
            f"{path} lists the modules {', '.join(names)}; expected Transformer, any of "
            f"Dense{what}: remove the file to read the encoder alone"
        )
    folders = dict(modules)
    encoder = modules[0][1]
    encoder_path = next(encoder.glob("sentence_*_config.json"), encoder / ENCODER_FILENAME)
    options = read_options(encoder_path, _ENCODER_OPTIONS)
    head = {"task": "multi_vector", "labels": [], "projections": []}
    tensors = {}
    for _, folder in modules[1 : 1 + num_dense]:
        for stored, tensor in read_tensors(folder).items():
            leaf = stored.removeprefix("linear.")
            tensors[f"projection_{len(head['projections'])}.{leaf}"] = tensor
        dense_options = DENSE_OPTIONS | _NORMALIZE_OPTIONS
        head["projections"].append(read_dense(folder / "config.json", dense_options))
    if (limit := read_limit(encoder_path, "max_seq_length")) is None:
        limit = read_limit(encoder / CONFIG_FILENAME, "model_max_length")
    markers = ()
    if is_pylate:
        values = read_options(model_path, _PYLATE_OPTIONS)
        own, markers = _pylate_settings(values)
    else:
        values = read_options(model_path, _MODEL_OPTIONS)
        mask_path = folders["MultiVectorMask"] / "config.json"
        mask = read_module(mask_path)
        check_options(mask_path, mask, _MASK_OPTIONS)
        if "Normalize" in rest:
            normalize_path = folders["Normalize"] / "config.json"
            # By default, it would normalize what a multi-vector model does not have.
            normalized = {"module_input_name": "sentence_embedding"} | read_module(normalize_path)
            check_options(normalize_path, normalized, _NORMALIZE_OPTIONS)
        own = {
            "normalize": "Normalize" in rest,
            "query_expansion": _read_expansion(encoder_path, options.get("query_expansion")),
            "skip_words": list(mask.get("skiplist_words") or ()),
            "prompts": _prompts(values),
        }
        if values.get("similarity_fn_name") == "meanmaxsim":
            own["similarity"] = "meanmaxsim"
        own |= _lengths(options, own["query_expansion"], limit)
    lower_cases = bool(options.get("do_lower_case"))
    return EmbeddingModules(encoder, head | own, tensors, lower_cases, markers=markers)


def _prompts(values: Mapping) -> dict[str, str]:
    """Returns the prompts, always those of queries and passages."""
    prompts = {name: prompt or "" for name, prompt in (values.get("prompts") or {}).items()}
    return {"query": "", "document": ""} | prompts


def _lengths(options: Mapping, expansion: Mapping | None, limit: int | None) -> dict:
    """Returns the lengths of queries and passages where they are known.

    `limit` is that of all texts without one of their own.
    """
    document_length = options.get("document_length") or limit
    query_length = options.get("query_length") or limit
    if expansion and expansion["strategy"] == "fixed":
        query_length = expansion["length"]
    found = {"max_seq_length": document_length, "max_query_length": query_length}
    return {name: length for name, length in found.items() if length is not None}


def _read_expansion(path: pathlib.Path, values: Mapping | None) -> dict | None:
    """Returns the "query_expansion" of a head, with all its keys. Raises ValueError."""
    if values is None:
        return None
    expansion = {"strategy": None, "length": None, "attend": False, "token": None} | values
    for name, value in expansion.items():
        if name not in _EXPANSION_OPTIONS or value not in (_EXPANSION_OPTIONS[name] or (value,)):
            expected = {name: each for name, each in _EXPANSION_OPTIONS.items() if each}
            raise ValueError(f"{path}: query_expansion has {name}={value!r}: expected {expected}")
    if type(expansion["length"]) is not int or expansion["length"] < 1:
        raise ValueError(
            f"{path}: query_expansion has length={expansion['length']!r}: expected a number of "
            "tokens from 1"
        )
    return expansion


def _pylate_settings(values: Mapping) -> tuple[dict, tuple[str, ...]]:
    """Returns the settings in a configuration of PyLate, and the texts that are one token."""
    length, expansion = values.get("query_length") or 32, None
    if values.get("do_query_expansion") is not False:
        attend = bool(values.get("attend_to_expansion_tokens"))
        expansion = {"strategy": "fixed", "length": length, "attend": attend, "token": None}
    prompts, markers = _prompts(values), []
    for name in ("query", "document"):
        prefix = values.get(f"{name}_prefix")
        if prefix is None:
            prefix = f"[{name[0].upper()}] "
        markers.append(prefix)
        prompts[name] = prefix + prompts[name].removeprefix(prefix)
    words = values.get("skiplist_words")
    settings = {
        "normalize": True,
        "query_expansion": expansion,
        "skip_words": list(string.punctuation) if words is None else list(words),
        "prompts": prompts,
        "max_seq_length": values.get("document_length") or 180,
        "max_query_length": length,
    }
    return settings, tuple(filter(None, markers))


def is_stanford(directory: pathlib.Path) -> bool:
    """Returns whether a directory is one of Stanford's ColBERT."""
    return STANFORD_CLASS in (read_optional(directory / "config.json").get("architectures") or ())


def read_stanford(directory: pathlib.Path) -> EmbeddingModules:
    """Reads the settings of Stanford's ColBERT, and its dense layer. Raises ValueError."""
    tensors = read_tensors(directory)
    if "linear.weight" not in tensors:
        raise ValueError(f"{directory} is a {STANFORD_CLASS}, but has no tensor linear.weight")
    values = read_optional(directory / STANFORD_FILENAME)
    names = {"dim": len(tensors["linear.weight"]), "similarity": "cosine"}
    for name, expected in names.items():
        if values.get(name, expected) != expected:
            found = f"{name} is {values[name]!r}, expected {expected!r}"
            raise ValueError(f"{directory / STANFORD_FILENAME}: {found}")
    length = values.get("query_maxlen") or 32
    attend = bool(values.get("attend_to_mask_tokens"))
    markers = (
        values.get("query_token_id") or "[unused0]",
        values.get("doc_token_id") or "[unused1]",
    )
    head = {
        "task": "multi_vector",
        "labels": [],
        "projections": [{"size": names["dim"], "has_bias": False, "activation": "identity"}],
        "normalize": True,
        "query_expansion": {
            "strategy": "fixed",
            "length": length,
            "attend": attend,
            "token": None,
        },
        "skip_words": list(string.punctuation) * bool(values.get("mask_punctuation", True)),
        "prompts": dict(zip(("query", "document"), (f"{each} " for each in markers), strict=True)),
        "max_query_length": length,
    }
    if values.get("doc_maxlen"):
        head["max_seq_length"] = values["doc_maxlen"]
    projection = {"projection_0.weight": tensors["linear.weight"]}
    return EmbeddingModules(
        directory, head, projection, False, markers=markers, taken=("linear.weight",)
    )


def multi_vector_files(hidden_size: int, head: Mapping) -> dict[str, list | dict]:
    """Returns the JSON files, by name, that `MultiVectorEncoder` needs for a multi-vector head."""
    modules, files = [("base.modules.transformer.Transformer", "")], {}
    size = hidden_size
    for projection in head["projections"]:
        folder = f"{len(modules)}_Dense"
        modules.append(("base.modules.dense.Dense", folder))
        files[f"{folder}/config.json"] = dense_config(size, projection) | {
            "module_input_name": _PLACE,
            "module_output_name": _PLACE,
        }
        size = projection["size"]
    folder = f"{len(modules)}_MultiVectorMask"
    mask = "multi_vector_encoder.modules.multi_vector_mask.MultiVectorMask"
    modules.append((mask, folder))
    files[f"{folder}/config.json"] = {
        "skiplist_words": head["skip_words"],
        "skiplist_tasks": ["document"],
        "keep_only_token_ids": None,
    }
    if head["normalize"]:
        folder = f"{len(modules)}_Normalize"
        modules.append(("base.modules.normalize.Normalize", folder))
        files[f"{folder}/config.json"] = dict.fromkeys(_NORMALIZE_OPTIONS, _PLACE)
    expansion = head["query_expansion"]
    files[ENCODER_FILENAME] = {
        "max_seq_length": head["max_seq_length"],
        "document_length": head["max_seq_length"],
        "query_length": head.get("max_query_length", head["max_seq_length"]),
        "query_expansion": expansion and dict(expansion),
    }
    files[MODEL_FILENAME] = {
        "model_type": "MultiVectorEncoder",
        "prompts": head["prompts"],
        "default_prompt_name": None,
        "similarity_fn_name": head.get("similarity", "maxsim"),
    }
    files[MODULES_FILENAME] = list_modules("sentence_transformers.", modules)
    return files


def pylate_files(
    hidden_size: int, head: Mapping, prefixes: Mapping[str, str]
) -> dict[str, list | dict]:
    """Returns the JSON files, by name, that PyLate's `ColBERT` needs for a multi-vector head.

    sentence-transformers reads them, too. `prefixes` are the prompts, of "query" and "document",
    that are one token: PyLate puts it before each text. Raises ValueError for what PyLate cannot
    do.
    """
    expansion = head["query_expansion"]
    problems = {
        "normalize": head["normalize"],
        "similarity": head.get("similarity", "maxsim") == "maxsim",
        "query_expansion": not expansion
        or (expansion["strategy"] == "fixed" and expansion["token"] is None),
        "projections": bool(head["projections"]),
    }
    for name, is_possible in problems.items():
        if not is_possible:
            raise ValueError(
                f"PyLate has no {name}={head[name]!r:.200}: export it for sentence-transformers"
            )
    files = multi_vector_files(hidden_size, head)
    files = {
        name: values
        for name, values in files.items()
        if not name.partition("/")[0].endswith(("_MultiVectorMask", "_Normalize"))
    }
    modules = [("sentence_transformers.models.Transformer", "")]
    for name, values in files.items():
        if name.endswith("_Dense/config.json"):
            for place in _NORMALIZE_OPTIONS:
                del values[place]
            values["use_residual"] = False
            modules.append((_PYLATE_DENSE, name.partition("/")[0]))
    files[MODULES_FILENAME] = list_modules("", modules)
    files[ENCODER_FILENAME] = {"max_seq_length": head["max_seq_length"], "do_lower_case": False}
    files[MODEL_FILENAME] = {
        "model_type": PYLATE_TYPE,
        "prompts": head["prompts"] | dict.fromkeys(prefixes, ""),
        "default_prompt_name": None,
        "similarity_fn_name": "MaxSim",
        "query_prefix": prefixes.get("query", ""),
        "document_prefix": prefixes.get("document", ""),
        "query_length": head.get("max_query_length", head["max_seq_length"]),
        "document_length": head["max_seq_length"],
        "do_query_expansion": bool(expansion),
        "attend_to_expansion_tokens": bool(expansion and expansion["attend"]),
        "skiplist_words": head["skip_words"],
    }
    return files
