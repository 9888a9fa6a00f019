"""Selects the head and the parameters that a task takes from its initial weights."""

from collections.abc import Collection, Mapping
from types import ModuleType

from absl import logging
from ml_collections import ConfigDict

from bert_jax.model.heads import HEADS
from bert_jax.tasks import spans
from bert_jax.tasks.labels import LABEL_SEPARATOR
from bert_jax.tasks.tag_sets import scheme_of_labels

# Fields of a configuration -> names under which a head stores what it was trained with.
TRAINED_WITH = {
    "max_seq_length": "max_seq_length",
    "features": "features",
    "lstm_size": "lstm_size",
    "model.lstm_size": "lstm_size",
    "similarity.pooling": "pooling",
    "similarity.normalize": "normalize",
    "similarity.temperature": "temperature",
    "data.scheme": "scheme",
    "data.document_context": "document_context",
    "data.regression": "regression",
    "data.label_separator": "label_separator",
    "data.max_query_length": "max_query_length",
    "data.doc_stride": "doc_stride",
    "data.max_answer_length": "max_answer_length",
    "data.null_answers": "null_answers",
    "data.null_threshold": "null_threshold",
}

# Values that a field has unless someone sets it, by a flag, the argument after the colon (`:v2`) or
# a config of one's own. Of the other fields only a flag shows that they were set.
UNSET = {
    "model.lstm_size": 0,
    "similarity.pooling": "mean",
    "similarity.normalize": True,
    "data.document_context": False,
    "data.regression": False,
    "data.label_separator": "",
    "data.null_answers": False,
    "data.null_threshold": None,
}


# Tasks of the configurations -> the heads that they predict with.
HEADS_OF_TASKS = {
    "text_classification": ("classification", "multi_label", "regression"),
    "glue": ("classification", "regression"),
    "squad": ("span",),
    "multiple_choice": ("multiple_choice",),
    "tagging": ("tagging", "feature_based"),
    "retrieval": ("embedding", "multiple_choice"),
}


def only_predicts(config: ConfigDict) -> bool:
    """Returns whether a configuration has nothing to train with or no epochs."""
    return not config.num_epochs or not config.data.get("train", True)


def with_settings_of_head(
    config: ConfigDict, head: Mapping, max_position_embeddings: int, given: Collection[str]
) -> ConfigDict:
    """Returns `config` with what `head` was trained with, as `bert_jax.load` uses it.

    `head` has the settings of the head in the weights. What it does not store, as in an imported
    model, is what `bert_jax.load` assumes, unless it is in `given`, the fields set by flags. Raises
    ValueError for a field that was set and contradicts the head.
    """
    heads = HEADS_OF_TASKS.get(config.task)
    if heads is not None and head["task"] not in heads:
        return config  # Reading the task says that it needs another head.
    check_modules(head)
    # A cross-encoder limits the length of its queries, and a head for endings of stories does not.
    if head["task"] == "multiple_choice" and config.data.get("role") != "bi_encoder":
        is_cross_encoder = "max_query_length" in head
        if is_cross_encoder != (config.task == "retrieval"):
            file = "retrieval.py:cross_encoder" if is_cross_encoder else "swag.py"
            raise ValueError(
                f"the head in {config.init_from} was not trained for task={config.task}: use "
                f"configs/finetune/{file}, or bert_jax.load(...).rank"
            )
    trained_with = dict(head)
    if head["task"] in ("classification", "multi_label", "regression"):
        trained_with["regression"] = head["task"] == "regression"
    assumed = {"max_seq_length": max_position_embeddings}
    if head["task"] == "span":
        lengths = spans.span_config(head, max_position_embeddings)._asdict()
        assumed = {name: value for name, value in lengths.items() if not name.startswith("null_")}
    elif head["task"] == "multi_label":
        assumed["label_separator"] = LABEL_SEPARATOR
    elif head["task"] in ("tagging", "feature_based") and config.data.scheme != "none":
        assumed["scheme"] = scheme_of_labels(head["labels"])
    elif head["task"] == "embedding":  # Without a limit of their own, queries are texts as others.
        assumed["max_query_length"] = head.get("max_seq_length", max_position_embeddings)
    config, changed = config.copy_and_resolve_references(), []
    for flag, name in TRAINED_WITH.items():
        if flag == "model.lstm_size" and "features" in head:  # That BiLSTM is the head itself.
            continue
        *folders, field = flag.split(".")
        fields = config
        for folder in folders:
            fields = fields.get(folder, {})
        if name not in trained_with | assumed or field not in fields:
            continue
        is_set = flag in given or fields[field] != UNSET.get(flag, fields[field])
        if name not in trained_with and is_set:
            continue
        value = trained_with.get(name, assumed.get(name))
        if fields[field] == value:
            continue
        if is_set:
            raise ValueError(
                f"--config.{flag}={fields[field]}: the head in {config.init_from} was trained with "
                f"{value}, and must predict with it: remove this flag"
            )
        fields[field] = value
        changed.append(f"{flag}={value}")
    if changed:
        logging.info("As the head in %s was trained: %s", config.init_from, ", ".join(changed))
    return config


def with_labels_of_head(
    config: ConfigDict, module: ModuleType, saved_head: Mapping | None
) -> ConfigDict:
    """Returns `config`, with the labels of `saved_head` if it gives neither labels nor train.

    `module` is the task's; `saved_head` has the settings of the head in the weights, if there is
    one. Raises ValueError if it has no labels for the task, or if `check_same_head` does.
    """
    data = config.data
    # An empty flag is parsed as one empty label.
    if "labels" not in data or any(map(str, data.labels)):
        return config
    if "train" not in data:  # GLUE: the classes are known, but not their order in the head.
        if config.num_epochs or not saved_head or saved_head["task"] != "classification":
            return config
        return _with_labels(config, saved_head)
    if data.train:
        return config
    task_head = module.get_head(config).name if hasattr(module, "get_head") else None
    if not saved_head or task_head not in (None, saved_head["task"]):
        has, fix = "no head", ""
        if saved_head:
            has = f"a head for {saved_head['task']}, not for {task_head}"
            if {task_head, saved_head["task"]} == {"classification", "regression"}:
                fix = f", or set --config.data.regression={task_head != 'regression'}"
            elif saved_head["task"] == "multi_label":
                fix = ", or set --config.data.label_separator"
        raise ValueError(
            f"no training data, and {config.init_from} has {has}: set --config.data.train=FILE, or "
            f"set --config.init_from to the workdir of a run that trained such a head{fix}"
        )
    config = _with_labels(config, saved_head)
    check_same_head(saved_head, config.data)
    return config


def _with_labels(config: ConfigDict, saved_head: Mapping) -> ConfigDict:
    config = config.copy_and_resolve_references()
    config.data.labels = tuple(saved_head["labels"])
    return config


def initial_params(
    params: Mapping,
    saved_head: Mapping | None,
    task_head: Mapping,
    new_head: bool,
    predicts: bool = False,
) -> dict:
    """Returns the parameters to start from: the encoder's, and the head's if it fits the task.

    `saved_head` has the settings of the head in `params`, if there is one; `task_head` has the
    settings of the task's. Raises ValueError, unless `new_head`, if `check_same_head` does, or if a
    run that only `predicts` would ignore the head.
    """
    encoder = dict(params["encoder"])
    if HEADS[task_head["task"]].input_kind != "pooled":
        encoder.pop("pooler", None)
    elif "pooler" not in encoder:
        logging.warning("The weights have no pooler: it is randomly initialized, as the head is")
    if not saved_head:
        return {"encoder": encoder}
    if saved_head["task"] == task_head["task"] and not new_head:
        check_modules(saved_head)
    if saved_head["task"] != task_head["task"] and predicts and not new_head:
        raise ValueError(
            f"the weights have a head for {saved_head['task']}, not for {task_head['task']}: use "
            "the configuration that trained it, or set --config.new_head=True to ignore the head"
        )
    if saved_head["task"] != task_head["task"] or new_head:
        why = "new_head is set" if new_head else f"this task needs a head for {task_head['task']}"
        logging.info("Ignoring the head for %s in the weights: %s", saved_head["task"], why)
        return {"encoder": encoder}
    check_same_head({"lstm_size": 0} | saved_head, {"lstm_size": 0} | task_head)
    if "scheme" in task_head and "scheme" not in saved_head:
        scheme = task_head["scheme"]
        logging.warning("The head has no tagging scheme: assuming --config.data.scheme=%s", scheme)
    logging.info("Starting from the head in the weights, which has the same labels")
    return {name: params[name] for name in ("head", "lstm") if name in params} | {
        "encoder": encoder
    }


def check_modules(head: Mapping) -> None:
    """Raises ValueError for modules of sentence-transformers that only `bert_jax.load` applies."""
    names = [name for name in ("projections", "prompt") if head.get(name)]
    if not isinstance(head.get("pooling", ""), str):
        names.append("pooling")
    if names:
        name = names[0]
        raise ValueError(
            f"the weights have a head with {name}={head[name]}, which only bert_jax.load applies: "
            "set --config.new_head=True to use the encoder alone"
        )


def check_same_head(saved_head: Mapping, task_head: Mapping) -> None:
    """Raises ValueError if both have labels, or an option of the same name, that differ."""
    lstm_size = "lstm_size" if "features" in saved_head else "model.lstm_size"
    flags = "features", lstm_size, "similarity.pooling", "similarity.normalize", "data.scheme"
    for flag in (*flags, "data.document_context", "data.labels"):
        name = flag.rpartition(".")[2]
        saved, new = saved_head.get(name), task_head.get(name)
        if name == "labels":
            saved, new = list(saved), list(new)
        is_free = name == "labels" and saved_head["task"] == "regression"  # It is only a name.
        if None not in (saved, new) and saved != new and not is_free:
            if name == "labels":
                saved, new = ",".join(saved), ",".join(new)
            raise ValueError(
                f"the weights have a head with {name}={saved}, and the task has {new}: set "
                f"--config.new_head=True for a new head, or --config.{flag}={saved}"
            )
