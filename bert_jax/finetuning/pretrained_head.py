"""Selects the head and the parameters that a task takes from its initial weights."""

from collections.abc import Mapping
from types import MappingProxyType

from absl import logging

from bert_jax.model.heads import Head, find_head
from bert_jax.tasks.prompts import NAMES, find_prompt


def initial_params(
    params: Mapping,
    model_config,
    saved_head: Mapping | None,
    task_head: Mapping,
    new_head: bool,
) -> dict:
    """Returns the parameters to start from: the encoder's, and the head's if it fits the task.

    If the model config says that the pooler is a part of the pre-training head, it is taken from
    there where the encoder has none. `saved_head` has the settings of the head in `params`, if any;
    `task_head` has those of the task's. Raises ValueError, unless `new_head`, if `check_same_head`
    does.
    """
    encoder = dict(params["encoder"])
    part = getattr(model_config, "pooler_in_lm_head", "")
    if part and "pooler" not in encoder and "mlm" in params:
        encoder["pooler"] = params["mlm"][part]
    reads_pooler = find_head(task_head).input_kind == "pooled" or (
        find_head(task_head).input_kind == "positions"
        and getattr(model_config, "pools_positions", False)
    )
    if not reads_pooler:
        encoder.pop("pooler", None)
    elif "pooler" not in encoder:
        logging.warning("The weights have no pooler: it is randomly initialized, as the head is")
    others = pretrained_modules(params, model_config, find_head(task_head))
    if not saved_head:
        return {"encoder": encoder} | others
    if saved_head["task"] == task_head["task"] and not new_head:
        check_modules(saved_head, task_head)
    if saved_head["task"] != task_head["task"] or new_head:
        why = "new_head is set" if new_head else f"this task needs a head for {task_head['task']}"
        logging.info("Ignoring the head for %s in the weights: %s", saved_head["task"], why)
        return {"encoder": encoder} | others
    check_same_head({"lstm_size": 0} | saved_head, {"lstm_size": 0} | task_head)
    if "scheme" in task_head and "scheme" not in saved_head:
        scheme = task_head["scheme"]
        logging.warning("The head has no tagging scheme: assuming config.data.scheme=%s", scheme)
    logging.info("Starting from the head in the weights, which has the same labels")
    names = (name for name in params if name in ("head", "lstm") or name.startswith("projection_"))
    return {name: params[name] for name in names} | {"encoder": encoder} | others


def pretrained_modules(params: Mapping, model_config, head: Head) -> dict:
    """Returns the modules of pre-training that a task's head has beside the encoder.

    Raises ValueError if the weights lack one, or predict tokens otherwise than the head does.
    """
    for name in head.pretrained_modules:
        if name not in params:
            raise ValueError(
                f"config.init_from has no parameters {name!r}, which the head {head.name} starts "
                "from: expected a masked LM, such as a pre-trained BERT with its masked-LM head"
            )
    if head.pretrained_modules and (
        model_config.causal or getattr(model_config, "has_query_stream", False)
    ):
        raise ValueError(
            f"config.init_from is a left-to-right or permutation LM: the head {head.name} needs a "
            "masked LM, such as BERT"
        )
    return {name: params[name] for name in head.pretrained_modules}


def check_modules(head: Mapping, task_head: Mapping = MappingProxyType({})) -> None:
    """Raises ValueError for modules of sentence-transformers that only `bert_jax.load` applies.

    That is also the case for prompts that a task does not have.
    """
    names = []
    if find_head(head).predicts == "token_vectors":
        fields = ("projections", "query_expansion", "skip_words", "similarity")
        for name in fields if task_head else ():
            if (saved := head.get(name)) != (new := task_head.get(name)):
                raise ValueError(
                    f"the weights have a multi-vector head with {name}={saved!r:.200}, and the "
                    f"task has {new!r:.200}: set fields of config.similarity or "
                    "config.data.max_query_length so that they agree, or config.new_head=True"
                )
    elif head.get("projections") and head["projections"] != task_head.get("projections"):
        layers = [
            (each["size"], each["has_bias"], each["activation"]) for each in head["projections"]
        ]
        if task_head and [(size, False, "identity") for size, *_ in layers[:1]] == layers:
            raise ValueError(
                f"the weights have a head with a dense layer of {layers[0][0]} outputs: set "
                f"config.similarity.vector_size={layers[0][0]}, or config.new_head=True"
            )
        names.append("projections")
    of_head, of_task = ([find_prompt(each, name) for name in NAMES] for each in (head, task_head))
    if of_head != of_task:
        query, passage = of_head
        raise ValueError(
            f"the weights have a head that was trained with prompts: set config.data.query_prompt="
            f"{query!r} and config.data.passage_prompt={passage!r}, or config.new_head=True to use "
            "the encoder alone"
        )
    if not isinstance(head.get("pooling", ""), str):
        names.append("pooling")
    if find_head(head).predicts == "sparse_vector":
        names += [name for name in (*find_head(head).options, "similarity") if name in head]
    if names:
        name = names[0]
        raise ValueError(
            f"the weights have a head with {name}={head[name]}, which only bert_jax.load applies: "
            "set config.new_head=True to use the encoder alone"
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
        # The label of a value is only a name.
        is_free = name == "labels" and find_head(saved_head).predicts == "value"
        if None not in (saved, new) and saved != new and not is_free:
            if name == "labels":
                saved, new = ",".join(saved), ",".join(new)
            raise ValueError(
                f"the weights have a head with {name}={saved}, and the task has {new}: set "
                f"config.new_head=True for a new head, or config.{flag}={saved}"
            )
