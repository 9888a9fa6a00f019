"""Selects the head and the parameters that a task takes from its initial weights."""

from collections.abc import Mapping
from types import ModuleType

from absl import logging
from ml_collections import ConfigDict

from bert_jax.model.heads import HEADS


def with_labels_of_head(
    config: ConfigDict, module: ModuleType, found: Mapping | None
) -> ConfigDict:
    """Returns `config`, with the labels of the head `found` if it gives no labels and no train.

    `module` is the task's; `found` describes the head in the weights, or is None. Raises ValueError
    if that head has no labels for the task, or if `check_same_head` does.
    """
    data = config.data
    # An empty flag is parsed as one empty label.
    if data.get("train", True) or "labels" not in data or any(map(str, data.labels)):
        return config
    wanted = module.get_head(config).name if hasattr(module, "get_head") else None
    if not found or wanted not in (None, found["task"]):
        has, fix = "no head", ""
        if found:
            has = f"a head for {found['task']}, not for {wanted}"
            if {wanted, found["task"]} == {"classification", "regression"}:
                fix = f", or set --config.data.regression={wanted != 'regression'}"
            elif found["task"] == "multi_label":
                fix = ", or set --config.data.label_separator"
        raise ValueError(
            f"nothing to train on, and {config.init_from} has {has}: give --config.data.train=FILE "
            f"or, as --config.init_from, the workdir of a run that trained one{fix}"
        )
    config = config.copy_and_resolve_references()
    config.data.labels = tuple(found["labels"])
    check_same_head(found, config.data)
    return config


def initial_params(params: Mapping, found: Mapping | None, wanted: Mapping, new_head: bool) -> dict:
    """Returns the parameters to start from: the encoder's, and the head's if it fits the task.

    `found` and `wanted` describe the head in `params`, if there is one, and the task's. Raises
    ValueError if `check_same_head` does, unless `new_head`.
    """
    bert = dict(params["bert"])
    if not HEADS[wanted["task"]].pooled:
        bert.pop("pooler", None)
    elif "pooler" not in bert:
        logging.warning("The weights have no pooler: it is randomly initialized, as the head is")
    if "head" not in params:
        return {"bert": bert}
    if found["task"] != wanted["task"] or new_head:
        why = "new_head is set" if new_head else f"this task needs a head for {wanted['task']}"
        logging.info("Ignoring the head for %s in the weights: %s", found["task"], why)
        return {"bert": bert}
    check_same_head(found, wanted)
    if "scheme" in wanted and "scheme" not in found:
        scheme = wanted["scheme"]
        logging.warning("The head has no tagging scheme: assuming --config.data.scheme=%s", scheme)
    logging.info("Starting from the head in the weights, which has the same labels")
    return {"bert": bert, "head": params["head"]}


def check_same_head(found: Mapping, given: Mapping) -> None:
    """Raises ValueError if both describe a head's labels, features or tags and they differ."""
    for flag in ("features", "lstm_size", "data.scheme", "data.document_context", "data.labels"):
        name = flag.removeprefix("data.")
        old, new = found.get(name), given.get(name)
        if name == "labels":
            old, new = ",".join(old), ",".join(new)
        is_free = name == "labels" and found["task"] == "regression"  # Its label is only a name.
        if old != new and name in found and name in given and not is_free:
            raise ValueError(
                f"the weights have a head with {name}={old}, and the task has {new}: set "
                f"--config.new_head=True for a new head, or --config.{flag}={old}"
            )
